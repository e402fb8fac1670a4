"""Trains an agent: supervised cold start on the environment's scripted teacher, RL on its reward, held-out evaluation.

    python experiments/train.py
    python experiments/train.py --tasks=experiments/data/arithmetic_words.jsonl
    python experiments/train.py --name=NAME --resume

Everything of a run is under runs/NAME: config.json, metrics.jsonl, tensorboard/, checkpoints/, transcripts.txt,
learning_curve.png, cold_start.png and summary.json. A run that was stopped, or killed, goes on with --resume as if
nothing had happened.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import building
import jax
import numpy as np
import reporting
import settings as settings_lib
from absl import app, flags, logging
from building import RL, SUPERVISED, Phase, Setup
from programs import Programs, Stop, use_cache
from settings import Settings
from summary import TRANSCRIPTS, summarize

import agentrl_jax
from agentrl_jax import manifest
from agentrl_jax.checkpoint import Checkpoints, read_metadata
from agentrl_jax.checkpoint import restore as restore_checkpoint
from agentrl_jax.evaluate import Evaluation
from agentrl_jax.logging import MetricsWriter, Progress, read_config, run_directory, write_config
from agentrl_jax.manifest import CheckpointError

TIMES = ("time", "seconds", "compile_seconds", "eval_seconds", "tokens_per_second")
"""Columns of a row that differ between two runs of the same settings."""
# Of a supervised step these describe the agent; all else describes its teacher's episodes.
_LEARNER = {"loss": "supervised_loss"} | {
    name: name
    for name in ("entropy", "grad_norm", "learning_rate", "clipped_updates", "skipped_updates", "loss_tokens", "tokens")
}
_SILENT = ("logp", "kl_old", "max_logp_gap", "cut_actions", "thinking", "split_miss")


def define_flags(values: flags.FlagValues, table: type = Settings) -> None:
    """One flag for each entry of the table, that in ``settings.py``."""
    for field in dataclasses.fields(table):
        name, default, more = field.name, field.default, field.metadata
        limits = {"lower_bound": more.get("low"), "upper_bound": more.get("high"), "flag_values": values}
        if "choices" in more:
            flags.DEFINE_enum(name, default, list(more["choices"]), more["help"], flag_values=values)
        elif isinstance(default, bool):
            flags.DEFINE_boolean(name, default, more["help"], flag_values=values)
        elif isinstance(default, tuple):
            flags.DEFINE_multi_string(name, list(default), more["help"], flag_values=values)
        elif isinstance(default, int):
            flags.DEFINE_integer(name, default, more["help"], **limits)
        elif isinstance(default, str):
            flags.DEFINE_string(name, default, more["help"], flag_values=values)
        else:
            flags.DEFINE_float(name, default, more["help"], **limits)


def given(values: flags.FlagValues, table: type = Settings) -> dict[str, Any]:
    """The settings that the command line gives, by name."""
    found = {}
    for field in dataclasses.fields(table):
        if values[field.name].present:
            value = values[field.name].value
            found[field.name] = tuple(value) if isinstance(value, list) else value
    return found


def open_run(given: dict[str, Any]) -> tuple[Setup, Path, bool]:
    """``(setup, directory, whether it goes on)``: everything is checked, nothing compiled.

    Raises:
      ValueError, FileExistsError: one line that says what is wrong.
    """
    settings = Settings(**given)
    if not settings.resume:
        settings = settings if settings.name else dataclasses.replace(settings, name=_free_name(settings))
        setup = building.build(settings)
        directory = run_directory(settings.root, settings.name)
        write_config(directory, _config(setup))
        return setup, directory, False
    if not settings.name:
        raise ValueError("--resume needs --name: which run of the folder --root to go on with")
    directory = run_directory(settings.root, settings.name, resume=True)
    if not (directory / "config.json").exists():
        return open_run({**given, "resume": False}) if not any(directory.iterdir()) else _no_run(directory)
    stored = read_config(directory)
    setup = building.build(settings_lib.merge(stored.get("settings", {}), given))
    changed = settings_lib.differences(stored.get("derived"), _config(setup)["derived"])
    if changed:
        raise ValueError(f"the run {settings.name!r} does not fit any more: {changed[0]}")
    return setup, directory, True


def _no_run(directory: Path) -> Any:
    raise ValueError(f"{directory} holds files, but no config.json: it is not a run")


def _free_name(settings: Settings) -> str:
    stem = f"{building.env_name(settings)}-{settings.algorithm}"
    number = 1
    while (Path(settings.root) / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"


def _config(setup: Setup) -> dict[str, Any]:
    versions = {"agentrl_jax": agentrl_jax.__version__, "jax": jax.__version__, "backend": jax.default_backend()}
    return {**building.describe(setup), "versions": versions}


class Trainer:
    """One run from where it stands to its end."""

    def __init__(self, setup: Setup, directory: Path) -> None:
        """Opens checkpoints and metrics where the run stands; a kill may come at any moment after as before."""
        self.setup, self.settings, self.directory = setup, setup.settings, directory
        self.config = _config(setup)
        root = jax.random.key(setup.settings.seed)
        self.keys = {name: jax.random.fold_in(root, i) for i, name in enumerate((SUPERVISED, RL, "evaluation"))}
        self.checkpoints = Checkpoints(
            directory / "checkpoints", keep_last=setup.settings.keep_last, metric="eval_success"
        )
        self.step, self.phase, self.state = restore(directory / "checkpoints", setup, self.config)
        self.writer = MetricsWriter(
            directory, resume_step=self.step + 1 if self.phase else 0, tensorboard=setup.settings.tensorboard
        )
        reporting.trim_transcripts(directory / TRANSCRIPTS, self.step if self.phase else -1)
        self.programs: Programs | None = None
        self.last_evaluation: Evaluation | None = None
        self._waited = self._clock = 0.0
        self.stop = Stop()

    def run(self) -> bool:
        """Trains to the end; False when a signal stopped it."""
        ahead = [phase for phase in self.setup.phases if phase.last > self.step]
        self.programs = Programs(self.setup, ahead, self.phase, self.keys[SUPERVISED]) if ahead else None
        for phase in ahead:
            if phase.name != self.phase:
                self._begin(phase)
            if not self._finish(phase):
                return False
        return True

    def close(self) -> None:
        """Writes what is in flight and closes all files."""
        if self.programs is not None:
            self.programs.close()
        self.writer.close()
        self.checkpoints.close()
        self.stop.restore()

    def _begin(self, phase: Phase) -> None:
        params = None if self.state is None else self.state.params["policy"]
        program = self._program(f"{phase.name} init")
        self.state = program(self.keys[phase.name], self.setup.hyper(phase), params)
        self.phase = phase.name
        if self.step == 0 and phase.name == RL:
            self._write(phase, {"step": 0, "phase": phase.name} | self._evaluate(phase))

    def _finish(self, phase: Phase) -> bool:
        """The steps of a phase: the metrics of a call are fetched after the next call is on its way."""
        program = self._program(phase.name)
        with _progress(self.settings, phase) as show:
            pending, self._clock = None, time.monotonic()
            while self.step < phase.last and not self.stop.signal:
                pause = self._next_pause(phase)
                count = min(phase.calls, pause - self.step)
                self.state, found = program(self.state, np.int32(count))
                for row in self._rows(phase, pending, show):
                    self._write(phase, row)
                pending, self.step = (self.step, count, found), self.step + count
                if self.step == pause or self.stop.signal:
                    self._pause(phase, self._rows(phase, pending, show))
                    pending, self._clock = None, time.monotonic()
        return not self.stop.signal

    def _next_pause(self, phase: Phase) -> int:
        """The next step after which there is an evaluation or a checkpoint."""
        every = self.settings.save_every
        found = [phase.last, (self.step // every + 1) * every]
        if phase.name == RL and self.settings.eval_every:
            done = (self.step - phase.first) // self.settings.eval_every
            found.append(phase.first + (done + 1) * self.settings.eval_every)
        return min(found)

    def _rows(self, phase: Phase, pending: tuple | None, show: Any) -> list[dict[str, Any]]:
        """The metrics of a call, one row a step."""
        if pending is None:
            return []
        first, count, found = pending
        found = jax.device_get(found)
        now = time.monotonic()
        seconds, self._clock = (now - self._clock) / count, now
        rows = []
        for i in range(count):
            numbers = {name: float(values[i]) for name, values in found.items()}
            times = {"seconds": seconds, "tokens_per_second": numbers["tokens"] / seconds}
            rows.append({"step": first + i + 1, "phase": phase.name, **_columns(numbers, phase), **times})
            show.update(first + i + 1 - phase.first, _shown(rows[-1]), phase=phase.name)
        return rows

    def _write(self, phase: Phase, row: dict[str, Any]) -> None:
        if self._waited:
            row, self._waited = {**row, "compile_seconds": self._waited}, 0.0
        self.writer.write(row["step"], {name: value for name, value in row.items() if name != "step"})

    def _pause(self, phase: Phase, rows: list[dict[str, Any]]) -> None:
        """Rows, evaluation where one is due, checkpoint, in this order: a checkpoint always finds its rows written."""
        for row in rows[:-1]:
            self._write(phase, row)
        every = self.settings.eval_every if phase.name == RL else 0
        due = self.step == phase.last or (every and (self.step - phase.first) % every == 0)
        found = self._evaluate(phase) if due else {}
        self._write(phase, rows[-1] | found)
        numbers = {"eval_success": found["eval_success"]} if due else {}
        self.checkpoints.save(self.step, self.state, {"config": self.config, "phase": phase.name}, numbers)

    def _evaluate(self, phase: Phase) -> dict[str, float]:
        """Evaluates the policy as it is, notes some episodes, and returns columns for the row."""
        program = self._program("evaluate")
        clock, chosen = time.monotonic(), self.settings
        found = self.last_evaluation = jax.device_get(self._play(program))
        numbers = reporting.outcome(found, self.setup.test.spec.members)
        title = f"({phase.name}), held-out tasks, sampled at temperature {chosen.temperature:g}"
        texts = reporting.episodes(found, self.setup.codec, chosen.transcripts)
        reporting.add_transcripts(self.directory / TRANSCRIPTS, self.step, title, texts)
        _say(f"evaluation after step {self.step} ({phase.name}): {reporting.in_short(numbers)}")
        if numbers.get("split_miss"):
            _say("warning: some held-out tasks were not found; evaluation played training tasks instead")
        return {f"eval_{name}": value for name, value in numbers.items()} | {"eval_seconds": time.monotonic() - clock}

    def _play(self, program: Callable[..., Evaluation]) -> Evaluation:
        """The held-out tasks: the same ones, with the same keys, at every call."""
        temperature = np.float32(self.settings.temperature)
        return program(self.state.params["policy"], self.keys["evaluation"], self.state.hyper.env_params, temperature)

    def _program(self, name: str) -> Callable[..., Any]:
        """A compiled program; the time it is waited for goes to the next row."""
        clock = time.monotonic()
        program = self.programs[name]
        self._waited += time.monotonic() - clock
        return program


def restore(directory: Path, setup: Setup, config: dict[str, Any]) -> tuple[int, str, Any]:
    """``(step, phase, state)`` of the newest checkpoint that is whole and of this run; ``(0, "", None)`` without any.

    Raises:
      CheckpointError: there are checkpoints, but none can be used.
    """
    found, skipped = manifest.scan(directory, contents=True)
    for _, reason in skipped:
        _say(f"warning: passed over a checkpoint: {reason}")
    phases = {phase.name: phase for phase in setup.phases}
    for folder, _ in reversed(found):
        try:
            notes = read_metadata(directory, folder.step)
            other = settings_lib.differences(notes.get("config", {}).get("derived"), config["derived"])
            if other or notes.get("phase") not in phases:
                raise CheckpointError(f"{folder.path} is of another run: {(other or ['no such phase'])[0]}")
            name = notes["phase"]
            state = restore_checkpoint(directory, setup.abstract(phases[name]), folder.step).state
            return folder.step, name, state
        except CheckpointError as error:
            _say(f"warning: passed over a checkpoint: {error}")
    if found or skipped:
        raise CheckpointError(f"no checkpoint in {directory} can be used: remove them to start the run again")
    return 0, "", None


def _columns(numbers: dict[str, float], phase: Phase) -> dict[str, float]:
    """Columns of a row: those of supervised episodes are the teacher's, and are named so."""
    if phase.name != SUPERVISED:
        return numbers
    own = {_LEARNER[name]: value for name, value in numbers.items() if name in _LEARNER}
    silent = (*_LEARNER, *_SILENT)
    return own | {f"teacher_{name}": value for name, value in numbers.items() if name not in silent}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """What the display gets: the loss of the cold start alone says something."""
    shown = {name: value for name, value in row.items() if name != "loss"}
    return {**shown, "loss": row["supervised_loss"]} if "supervised_loss" in row else shown


class _Silent:
    """A progress display that shows nothing."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, step: int, metrics: Any, *, phase: str = "") -> None:
        pass


def _progress(settings: Settings, phase: Phase) -> Any:
    if settings.progress == "off":
        return _Silent()
    live = {"auto": None, "live": True, "plain": False}[settings.progress]
    total = phase.last - phase.first
    return Progress(total, every=50 if phase.name == SUPERVISED else 5, live=live)


def _say(text: str) -> None:
    print(text, flush=True)


def train_run(given: dict[str, Any]) -> int:
    """Runs what the flags say; the exit status: 0, or 128 + the signal that stopped it."""
    started = time.monotonic()
    try:
        setup, directory, again = open_run(given)
        use_cache(setup.settings.compile_cache)
        trainer = Trainer(setup, directory)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    where = f" goes on after step {trainer.step} of {setup.total}" if again else f": {setup.total} steps"
    ahead = "; compiling in the background ..." if trainer.step < setup.total else ""
    _say("\n".join([*setup.notes, f"run {directory}{where}{ahead}"]))
    try:
        done = trainer.run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        trainer.close()
    if not done:
        _say(f"stopped after step {trainer.step}: go on with --resume --name={setup.settings.name}")
        return 128 + trainer.stop.signal
    if trainer.last_evaluation is not None:
        style = "ansi" if sys.stdout.isatty() else "text"
        _say("\n" + "\n".join(reporting.episodes(trainer.last_evaluation, setup.codec, 3, style=style)))
    _say(summarize(setup, directory, started))
    return 0


def parse(argv: Sequence[str]) -> list[str]:
    """The flags parser of ``app.run``: a wrong flag is one line and exit status 2."""
    try:
        rest = flags.FLAGS(list(argv))
        if len(rest) > 1:
            raise flags.Error(f"unexpected argument {rest[1]!r}: every setting is a flag, --name=value")
        return rest
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str]) -> int:
    del argv
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    return train_run(given(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=parse)
