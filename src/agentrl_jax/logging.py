"""What a run writes while it goes on: its directory, configuration, metrics, TensorBoard events, live progress.

Host side only: numbers come in after the jitted step returned them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from agentrl_jax.files import dumps, loads, safe_child, write_atomic

METRICS, CONFIG, EVENTS = "metrics.jsonl", "config.json", "tensorboard"

_SHOWN = (
    ("loss", "loss", "{:.3f}"),
    ("reward", "reward", "{:.3f}"),
    ("success", "success", "{:.1%}"),
    ("tool_rate", "tool rate", "{:.1%}"),
    ("tool_calls", "tool calls", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("kl", "KL", "{:.2e}"),
    ("kl_old", "KL", "{:.2e}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


def run_directory(root: str | os.PathLike[str], name: str, *, resume: bool = False) -> Path:
    """Creates ``root / name`` for a new run, or returns that of a run to go on with.

    Args:
      root: where runs live; created when missing.
      name: a relative path that stays inside ``root``.
      resume: whether an existing run may be continued; without one, a new run starts.

    Raises:
      ValueError: the name is unsafe (``files.safe_child``).
      FileExistsError: the directory holds a run already and ``resume`` is False, or it is a file.
    """
    directory = safe_child(root, name)
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; choose another name for the run")
    if directory.is_dir() and any(directory.iterdir()) and not resume:
        raise FileExistsError(f"the run {name!r} exists in {os.fspath(root)!r}: resume it, or choose another name")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def write_config(directory: str | os.PathLike[str], config: Mapping[str, Any]) -> Path:
    """Writes ``config.json`` atomically, so that ``read_config`` gives back an equal dict (``files.dumps``).

    Raises:
      TypeError: a value that JSON cannot hold; turn named tuples and dataclasses into dicts first.
    """
    path = Path(directory) / CONFIG
    write_atomic(path, dumps(dict(config), indent=2) + "\n")
    return path


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads ``config.json``.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a JSON object.
    """
    path = Path(directory) / CONFIG
    try:
        config = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


class MetricsWriter:
    """Appends one row a step to ``metrics.jsonl`` and to TensorBoard; use it as a context manager or call ``close``.

    A row is one JSON object with ``step``, ``time`` (seconds since the epoch) and the metrics, flushed at once. JSON
    has no NaN: non-finite numbers are written as null, and ``read_metrics`` turns null back into NaN.

    Args:
      directory: of the run.
      resume_step: the step training goes on from. Rows at or after it, and a last line cut by a kill, are dropped in
        one atomic rewrite, so no step appears twice. None keeps all.
      tensorboard: whether to write events under ``tensorboard/``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, resume_step: int | None = None, tensorboard: bool = True
    ) -> None:
        """See the class."""
        self.path = Path(directory) / METRICS
        self._last = _trim(self.path, resume_step)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            # purge_step makes TensorBoard hide what an earlier run wrote at or after that step.
            self._events = SummaryWriter(os.fspath(Path(directory) / EVENTS), purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the row of a step and returns it.

        Args:
          step: larger than every step before.
          metrics: numbers (Python, NumPy or JAX scalars), strings and booleans by name.

        Raises:
          ValueError: the step is not larger, a value is not a scalar, or a name is ``step`` or ``time``.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} comes after step {self._last}: steps must increase")
        reserved = sorted({"step", "time"} & set(metrics))
        if reserved:
            raise ValueError(f"{reserved} cannot be names of metrics")
        row = {"step": int(step), "time": round(time.time(), 3)}
        row |= {name: _scalar(name, value) for name, value in metrics.items()}
        self._file.write(json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False) + "\n")
        self._file.flush()
        self._last = int(step)
        self._write_events(row)
        return row

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _write_events(self, row: Mapping[str, Any]) -> None:
        if self._events is None:
            return
        for name, value in row.items():
            if name not in ("step", "time") and not isinstance(value, str) and math.isfinite(value):
                self._events.add_scalar(name, value, row["step"], walltime=row["time"])
        self._events.flush()


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` with null as NaN; a last line cut by a kill is left out.

    Raises:
      ValueError: another line is not a JSON object with a step; the line is named.
    """
    path = Path(directory) / METRICS
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in _rows(path)]


class Progress:
    """A live display on a terminal, and a plain line every ``every`` steps elsewhere.

    It shows phase, steps and time left, and of the metrics ``loss``, ``reward``, ``success``, ``tool_rate``,
    ``tool_calls``, ``entropy``, ``kl`` (or ``kl_old``) and ``tokens_per_second`` those that there are.
    Nothing a metric does stops training: one that is missing, not a number or not finite is shown as ``-``.

    Args:
      total: steps of all phases together.
      every: steps between plain lines; first and last are always shown.
      file: where to write; standard output by default.
      live: True or False to decide; None to look whether ``file`` is a terminal.
    """

    def __init__(self, total: int, *, every: int = 10, file: TextIO | None = None, live: bool | None = None) -> None:
        """See the class."""
        from rich.console import Console

        self._console = Console(file=file, highlight=False, soft_wrap=True, force_terminal=live)
        self._total, self._every = total, max(1, every)
        self._clock = _Clock(total)
        self._state: tuple[int, str, Mapping[str, Any]] = (0, "compiling", {})
        self._live: Any = None
        if self._console.is_terminal if live is None else live:
            from rich.live import Live

            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4, redirect_stderr=False
            )
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, Any], *, phase: str = "") -> None:
        """Shows that ``step`` (the number of finished steps) is done, with its metrics."""
        self._clock.tick(step)
        self._state = (step, phase, metrics)
        if self._live is None and (step <= 1 or step % self._every == 0 or step >= self._total):
            self._console.print(self.line(), markup=False)

    def line(self) -> str:
        """The present state as one plain line."""
        step, phase, metrics = self._state
        shown = (f"{label} {_shown(metrics.get(name), form)}" for name, label, form in _SHOWN if name in metrics)
        head = f"{phase} {step}/{self._total}".strip()
        return " | ".join([head, *shown, f"left {self._clock.left()}"])

    def close(self) -> None:
        """Stops the display and leaves its last state on screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step, phase, metrics = self._state
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=step, width=30)
        head.add_row(Text(phase, style="bold"), bar, f"{step}/{self._total}", f"left {self._clock.left()}")
        numbers = Table.grid(padding=(0, 2))
        shown = [(name, label, form) for name, label, form in _SHOWN if name in metrics]
        numbers.add_row(*(Text(label, style="dim") for _, label, _ in shown))
        numbers.add_row(*(_shown(metrics[name], form) for name, _, form in shown))
        return Group(head, numbers)


class _Clock:
    """Time left, from a moving average of the steps after the first, which compiles."""

    def __init__(self, total: int) -> None:
        self._total, self._step, self._then, self._pace = total, 0, math.nan, math.nan

    def tick(self, step: int) -> None:
        now = time.monotonic()
        if step > self._step and math.isfinite(self._then):
            pace = (now - self._then) / (step - self._step)
            self._pace = 0.8 * self._pace + 0.2 * pace if math.isfinite(self._pace) else pace
        self._step, self._then = step, now

    def left(self) -> str:
        if not math.isfinite(self._pace):
            return "-"
        seconds = round(max(0, self._total - self._step) * self._pace)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _shown(value: Any, form: str) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "-"
    return form.format(number) if math.isfinite(number) else "-"


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype == object:
        raise ValueError(f"metric {name!r} is {value!r}; expected one number, string or boolean")
    return array.item()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; only its last line may be cut short."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                rows.append(_row(line))
        except ValueError as error:
            if number < len(lines):  # Complete lines end with a newline, so a cut one is the last item.
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError(f"expected an object with an integer step, found {line[:80]!r}")
    return row


def _trim(path: Path, resume_step: int | None) -> int | None:
    """Drops rows at or after ``resume_step`` and a cut last line; returns the last step that stays."""
    if not path.exists():
        return None
    kept = [row for row in _rows(path) if resume_step is None or row["step"] < resume_step]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept)
    if path.read_bytes() != text.encode():
        write_atomic(path, text)
    return max((row["step"] for row in kept), default=None)
