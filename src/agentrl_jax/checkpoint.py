"""Checkpoints of a whole train state: asynchronous, atomic, verified, and bit-exact on the way back.

Orbax writes the arrays; this module decides when a folder counts. A save goes to a hidden staging folder, gets a
manifest (``agentrl_jax.manifest``) once the arrays are committed, and appears under its name in one rename, so a kill
at any moment leaves the earlier checkpoints as they were. Nothing is ever unpickled.
"""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from agentrl_jax.files import dumps, sync
from agentrl_jax.manifest import (
    ARRAYS,
    CheckpointError,
    Folder,
    folder_name,
    folders,
    scan,
    seal,
    verify_named,
    walk_back,
)
from agentrl_jax.storage import compare, describe, load_arrays, place, save_arrays, stored, to_host
from agentrl_jax.types import PyTree

_STAGING, _DELETING = ".saving-", ".deleting-"


class Restored(NamedTuple):
    """``step``, ``state`` (the structure of the abstract state) and the ``metadata`` saved with it."""

    step: int
    state: PyTree
    metadata: dict[str, Any]


class Checkpoints:
    """Writes the checkpoints of one run; use it as a context manager, or call ``close``.

    ``save`` copies the state to host memory before it returns, so donated buffers are safe; one thread writes. At
    most one save is in flight; an error in it is raised by the next ``save``, ``wait`` or ``close``. Over several
    processes every process calls ``save``, which then returns only when the checkpoint is complete.

    Args:
      directory: where ``step_<n>`` folders go; created when missing.
      keep_last: newest complete checkpoints to keep; -1 keeps all.
      keep_best: complete checkpoints with the best ``metric`` to keep beside them, when ``metric`` is given.
      metric: a name in ``metrics``.
      mode: ``"max"`` or ``"min"``.

    Raises:
      ValueError: ``keep_last`` is 0 or below -1, ``keep_best`` is negative, or ``mode`` is unknown.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str | None = None,
        mode: str = "max",
    ) -> None:
        """See the class."""
        if keep_last == 0 or keep_last < -1:
            raise ValueError(f"keep_last is {keep_last}; allowed are 1 and above, or -1 to keep all")
        if keep_best < 0:
            raise ValueError(f"keep_best is {keep_best}; allowed are 0 and above")
        _check_mode(mode)
        self.directory = Path(directory).absolute()
        self._retention = (keep_last, keep_best, metric, mode)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.directory)

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Saves ``state`` as ``step``; saving a step again replaces it once the new one is complete.

        Args:
          step: non-negative.
          state: any pytree of arrays, typed keys, and Python int, float or bool.
          metadata: what JSON can hold (``files.dumps``): configuration, codec name, model configuration.
          metrics: numbers for ``best``; non-finite ones never win.
          wait: return only when it is on disk.

        Raises:
          CheckpointError: a leaf that cannot be saved, named by its path; or the previous save failed.
          TypeError: metadata that JSON cannot hold.
        """
        step = _check_step(step)
        self.wait()
        leaves, arrays = to_host(state)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        notes = dict(metadata or {})
        dumps(notes)  # Refused here, not later in the thread.
        if jax.process_count() > 1:
            self._write_together(step, leaves, arrays, notes, numbers)
            return
        self._pending = self._worker.submit(self._write, step, leaves, arrays, notes, numbers)
        if wait:
            self.wait()

    def restore(self, abstract_state: PyTree, step: int | None = None) -> Restored:
        """``restore`` of this directory, after any save in flight."""
        self.wait()
        return restore(self.directory, abstract_state, step)

    def wait(self) -> None:
        """Returns when no save is in flight.

        Raises:
          CheckpointError: the save failed; earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise CheckpointError(f"saving to {self.directory} failed: {error}") from error

    def close(self) -> None:
        """Waits for the save in flight and releases the thread; raises what ``wait`` raises."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> Checkpoints:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _write(self, step: int, leaves: list, arrays: dict, metadata: dict, metrics: dict) -> None:
        staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{step}-", dir=self.directory))
        try:
            save_arrays(staging / ARRAYS, arrays)
            self._publish(staging, step, leaves, metadata, metrics)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write_together(self, step: int, leaves: list, arrays: dict, metadata: dict, metrics: dict) -> None:
        """Every process writes its shards into one staging folder; the first one publishes it."""
        from jax.experimental import multihost_utils

        staging = self.directory / f"{_STAGING}{step}"
        if jax.process_index() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        multihost_utils.sync_global_devices(f"checkpoint {step} staged")
        save_arrays(staging / ARRAYS, arrays)
        if jax.process_index() == 0:
            self._publish(staging, step, leaves, metadata, metrics)
        multihost_utils.sync_global_devices(f"checkpoint {step} published")

    def _publish(self, staging: Path, step: int, leaves: list, metadata: dict, metrics: dict) -> None:
        seal(staging, step, leaves, metadata, metrics)
        taken = [folder.revision for folder in folders(self.directory) if folder.step == step]
        target = self.directory / folder_name(step, max(taken, default=-1) + 1)
        staging.chmod(0o755)
        os.rename(staging, target)
        sync(self.directory)
        _prune(self.directory, step, *self._retention)


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps with a complete checkpoint (manifest and file sizes), ascending."""
    return [folder.step for folder, _ in scan(directory).found]


def latest(directory: str | os.PathLike[str]) -> int | None:
    """The newest step whose every checksum holds, or None; damaged newer ones are passed over with a warning."""
    return next((folder.step for folder, _ in walk_back(folders(directory))), None)


def best(directory: str | os.PathLike[str], metric: str, mode: str = "max") -> int | None:
    """The step with the best finite ``metric`` whose every checksum holds (the newest among equals), or None."""
    return next((folder.step for folder, _ in walk_back(_ranked(directory, metric, mode))), None)


def read_metadata(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The metadata of a step, or of the newest usable one, without reading arrays into memory.

    Raises:
      CheckpointError: there is no such usable checkpoint.
    """
    return _select(directory, step)[1]["metadata"]


def restore(source: str | os.PathLike[str] | Checkpoints, abstract_state: PyTree, step: int | None = None) -> Restored:
    """Reads a checkpoint into the structure of ``abstract_state``; every bit as it was saved.

    Args:
      source: a directory, or the ``Checkpoints`` that writes it.
      abstract_state: a state, or ``jax.eval_shape`` of what makes one. A leaf with a sharding is placed on it; a
        NumPy leaf or Python number comes back as one; any other leaf goes to the default device.
      step: default the newest one whose every checksum holds; damaged newer ones are passed over with a warning.

    Raises:
      CheckpointError: nothing usable was found; or paths, shapes, dtypes or key implementations differ, of which the
        first are named. All of it is compared before anything is allocated.
    """
    if isinstance(source, Checkpoints):
        return source.restore(abstract_state, step)
    folder, body = _select(source, step)
    wanted, treedef = jax.tree.flatten_with_path(abstract_state)
    described = [describe(path, leaf) for path, leaf in wanted]
    compare(folder.path, body["leaves"], described)
    arrays = load_arrays(folder.path / ARRAYS, [leaf for leaf in described if stored(leaf)])
    placed = [place(arrays.get(leaf["path"]), like) for leaf, (_, like) in zip(described, wanted, strict=True)]
    return Restored(folder.step, jax.tree.unflatten(treedef, placed), body["metadata"])


def _check_step(step: Any) -> int:
    if isinstance(step, bool):
        raise ValueError(f"step is {step}; expected an integer")
    step = operator.index(step)
    if not 0 <= step < 10**18:
        raise ValueError(f"step is {step}; allowed are 0 to 10**18 - 1")
    return step


def _check_mode(mode: str) -> None:
    if mode not in ("max", "min"):
        raise ValueError(f"mode is {mode!r}; allowed are 'max' and 'min'")


def _select(directory: str | os.PathLike[str], step: int | None) -> tuple[Folder, dict[str, Any]]:
    """The newest usable checkpoint, or that of ``step``, verified in full."""
    if not Path(directory).is_dir():
        raise CheckpointError(f"no checkpoint: the directory {os.fspath(directory)!r} does not exist")
    candidates = folders(directory)
    if step is not None:
        candidates = [folder for folder in candidates if folder.step == _check_step(step)]
    chosen = next(walk_back(candidates), None)
    if chosen is not None:
        return chosen
    looked = "step_<n> folders" if step is None else f"step_{step}"
    found, skipped = scan(directory, contents=True)
    reasons = "; ".join(reason for _, reason in skipped) or "nothing was skipped"
    usable = [folder.step for folder, _ in found]
    raise CheckpointError(
        f"no usable checkpoint in {os.fspath(directory)!r}: looked for {looked}, usable are {usable} ({reasons})"
    )


def _ranked(directory: str | os.PathLike[str], metric: str, mode: str) -> list[Folder]:
    """Complete checkpoints with a finite metric, the best last."""
    _check_mode(mode)
    sign = 1.0 if mode == "max" else -1.0
    scored = [(sign * body["metrics"].get(metric, np.nan), folder) for folder, body in scan(directory).found]
    return [folder for score, folder in sorted(pair for pair in scored if np.isfinite(pair[0]))]


def _prune(directory: Path, newest: int, keep_last: int, keep_best: int, metric: str | None, mode: str) -> None:
    """Removes complete checkpoints beyond the limits and older revisions; never ``newest``, never what is not ours."""
    kept = [folder for folder, _ in scan(directory).found]
    keep = {folder.path for folder in kept if folder.step == newest}
    keep |= {folder.path for folder in (kept if keep_last == -1 else kept[-keep_last:])}
    if metric is not None and keep_best:
        keep |= {folder.path for folder in _ranked(directory, metric, mode)[-keep_best:]}
    for folder in folders(directory):
        if folder.path not in keep and _complete(folder):
            doomed = Path(tempfile.mkdtemp(prefix=_DELETING, dir=directory)) / folder.path.name
            os.rename(folder.path, doomed)  # First out of sight: a half-deleted folder is never found.
            shutil.rmtree(doomed.parent, ignore_errors=True)


def _complete(folder: Folder) -> bool:
    try:
        verify_named(folder, contents=False)
    except CheckpointError:
        return False
    return True


def _remove_leftovers(directory: Path) -> None:
    """Staging and deletion folders of a killed writer; a directory has one writer at a time."""
    for prefix in (_STAGING, _DELETING):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
