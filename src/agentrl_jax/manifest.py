"""What makes a checkpoint folder complete: a manifest of every leaf and every file, written after both.

A checkpoint is a folder ``step_<n>`` (``step_<n>.<r>`` when the step was saved again) that holds ``state/`` (arrays)
and ``manifest.json``: step, leaves (path, shape, dtype, key implementation), files (size, SHA-256), metadata and
metrics, sealed by a SHA-256 of its own. Anything else found in the directory is reported and skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_jax.files import dumps, loads, safe_child, sync, write_atomic

FORMAT = "agentrl_jax.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
ARRAYS = "state"
_FIELDS = {"format": str, "version": int, "step": int, "leaves": list, "files": dict, "metadata": dict, "metrics": dict}
# Digits are ASCII and at most 18, so that the step fits 64 bits; zero-padded and bare numbers count as steps too.
_NAME = re.compile(r"(?:step_)?([0-9]{1,18})(?:\.([0-9]{1,9}))?")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, foreign, or does not fit the state it is restored into."""


class Folder(NamedTuple):
    """A folder whose name is that of a checkpoint, complete or not. Sorting puts the newest last."""

    step: int
    revision: int
    path: Path


class Skipped(NamedTuple):
    """A folder that looked like a checkpoint, and why it is not used."""

    path: Path
    reason: str


class Scan(NamedTuple):
    """The usable checkpoints of a directory, oldest first, with their manifests; and the folders passed over."""

    found: list[tuple[Folder, dict[str, Any]]]
    skipped: list[Skipped]


def folder_name(step: int, revision: int) -> str:
    """``step_<n>``, or ``step_<n>.<revision>`` for a step saved again."""
    return f"step_{step}" if revision == 0 else f"step_{step}.{revision}"


def folders(directory: str | os.PathLike[str]) -> list[Folder]:
    """Entries named like checkpoints, by number (``step_10`` after ``step_9``); none for a missing directory."""
    root = Path(directory)
    names = os.listdir(root) if root.is_dir() else []
    matches = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(Folder(int(match[1]), int(match[2] or 0), root / name) for match, name in matches)


def seal(folder: Path, step: int, leaves: list[dict[str, Any]], metadata: Any, metrics: dict[str, float]) -> None:
    """Flushes every file of ``folder`` and writes the manifest that makes it a checkpoint."""
    for path in folder.rglob("*"):
        sync(path)
    body = {"format": FORMAT, "version": VERSION, "step": step, "leaves": leaves, "files": _digests(folder)}
    body |= {"metadata": metadata, "metrics": metrics}
    write_atomic(folder / MANIFEST, dumps({"checksum": _digest(body), "body": body}, indent=1))


def verify(folder: Path, *, contents: bool = True) -> dict[str, Any]:
    """The manifest of a complete checkpoint; ``contents=False`` compares sizes but reads no data file.

    Raises:
      CheckpointError: no manifest, a damaged one, another format, or a file that is missing, truncated or altered.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder of its own")
    body = _read_manifest(folder)
    for name, entry in body["files"].items():
        _verify_file(folder, name, entry, contents)
    return body


def scan(directory: str | os.PathLike[str], *, contents: bool = False) -> Scan:
    """Every usable checkpoint, the newest revision of each step alone, and what was skipped and why."""
    found: dict[int, tuple[Folder, dict[str, Any]]] = {}
    skipped = []
    for folder in folders(directory):
        try:
            found[folder.step] = (folder, verify_named(folder, contents=contents))
        except CheckpointError as error:
            skipped.append(Skipped(folder.path, str(error)))
    return Scan([found[step] for step in sorted(found)], skipped)


def verify_named(folder: Folder, *, contents: bool = True) -> dict[str, Any]:
    """``verify``, and the manifest speaks of the step in the folder's name.

    Raises:
      CheckpointError: as ``verify``, or the steps differ.
    """
    body = verify(folder.path, contents=contents)
    if body["step"] != folder.step:
        raise CheckpointError(f"{folder.path} holds step {body['step']}, not {folder.step} as its name says")
    return body


def walk_back(candidates: list[Folder]) -> Iterator[tuple[Folder, dict[str, Any]]]:
    """Candidates from the last to the first that survive a full verification; the others raise a warning each."""
    for folder in reversed(candidates):
        try:
            body = verify_named(folder)
        except CheckpointError as error:
            warnings.warn(f"skipped a checkpoint: {error}", stacklevel=3)
            continue
        yield folder, body


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        sealed = loads(path.read_text(encoding="utf-8"))
        body, checksum = sealed["body"], sealed["checksum"]
        matches = _digest(body) == checksum
        whole = all(isinstance(body[field], kind) for field, kind in _FIELDS.items())
    except OSError as error:
        raise CheckpointError(f"{folder} is incomplete or foreign: it has no readable {MANIFEST}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a checkpoint manifest: {error}") from error
    if not matches:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    if not whole or body["format"] != FORMAT or body["version"] != VERSION:
        found = (body["format"], body["version"])
        raise CheckpointError(f"{path} has format {found}; this version reads {(FORMAT, VERSION)}")
    return body


def _verify_file(folder: Path, name: str, entry: dict[str, Any], contents: bool) -> None:
    try:
        path = safe_child(folder, name)
        size = path.stat().st_size
        if size != entry["size"]:
            raise CheckpointError(f"{path} is truncated or altered: {size} bytes, {entry['size']} expected")
        if contents and _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
    except OSError as error:
        raise CheckpointError(f"{folder} is incomplete: {name} cannot be read") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} names an unsafe file: {error}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(dumps(body).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in paths
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
