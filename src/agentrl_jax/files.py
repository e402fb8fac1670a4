"""Host files: names that stay inside their folder, atomic writes, JSON that reads back equal."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def safe_child(root: str | os.PathLike[str], name: str) -> Path:
    """``root / name``, refused unless it lies inside ``root``.

    The check is on path components after symbolic links are resolved, never on string prefixes: ``/a/ckpt2`` is
    not inside ``/a/ckpt``.

    Raises:
      ValueError: ``name`` is empty, absolute, holds NUL or a backslash, steps up with ``..``, or leads outside
        through a symbolic link.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{name!r} is not a name: expected a non-empty relative path")
    if "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a safe name: it holds NUL or a backslash")
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a safe name: it must be relative, without empty, '.' or '..' parts")
    child = Path(root) / name
    if not child.resolve().is_relative_to(Path(root).resolve()):
        raise ValueError(f"{name!r} leads outside {os.fspath(root)!r} through a symbolic link")
    return child


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8 text so that a reader, or a kill at any moment, sees the old file or the new one, never half."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(target.parent)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON with sorted keys that ``loads`` reads back equal, tuples and non-finite floats included.

    A tuple becomes ``{"__tuple__": [...]}`` and a non-finite float ``{"__float__": "nan" | "inf" | "-inf"}``,
    because JSON has neither.

    Raises:
      TypeError: anything but None, bool, int, float, str, list, plain tuple, and dict with string keys.
    """
    return json.dumps(_encode(value, "value"), indent=indent, sort_keys=True, allow_nan=False, ensure_ascii=False)


def loads(text: str) -> Any:
    """Reads what ``dumps`` wrote.

    Raises:
      ValueError: the text is not JSON.
    """
    try:
        return json.loads(text, object_hook=_decode)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"__float__": repr(value)}
    if type(value) is tuple:
        return {"__tuple__": [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is list:
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        reserved = [key for key in value if not isinstance(key, str) or key in ("__tuple__", "__float__")]
        if reserved:
            raise TypeError(f"{where} has the key {reserved[0]!r}: keys must be strings, not __tuple__ or __float__")
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}; "
        "only None, bool, int, float, str, list, plain tuple and dict can be written"
    )


def _decode(item: dict[str, Any]) -> Any:
    if item.keys() == {"__tuple__"}:
        return tuple(item["__tuple__"])
    if item.keys() == {"__float__"}:
        return float(item["__float__"])
    return item
