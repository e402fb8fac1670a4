"""Evaluates a checkpoint on any environment: greedy success and sampled pass@k with 95 % intervals, tool use, lengths.

python experiments/evaluate.py --run=runs/NAME
python experiments/evaluate.py --run=runs/NAME --step=best --env_params=max_digits=4 --samples=16
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import building
import jax
import numpy as np
import programs
import reporting
import settings as settings_lib
import train as training
from absl import app, flags, logging
from building import Setup
from settings import Settings

from agentrl_jax import checkpoint
from agentrl_jax.envs.base import canonical_params
from agentrl_jax.evaluate import Evaluation
from agentrl_jax.files import write_atomic
from agentrl_jax.manifest import CheckpointError


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this program."""
    text = lambda name, default, help_: flags.DEFINE_string(name, default, help_, flag_values=values)  # noqa: E731
    several = lambda name, help_: flags.DEFINE_multi_string(name, [], help_, flag_values=values)  # noqa: E731
    number = lambda name, default, help_, low: flags.DEFINE_integer(name, default, help_, low, flag_values=values)  # noqa: E731
    real = lambda name, help_, low, high: flags.DEFINE_float(name, None, help_, low, high, flag_values=values)  # noqa: E731
    text("run", "", "Folder of the run, runs/NAME.")
    text("step", "latest", "Which checkpoint: a step, latest, or best (by held-out success).")
    text("env", "", "Environment to play. Default: the run's.")
    text("tasks", "", "Questions from a JSONL file instead.")
    several(
        "env_option", "name=value: structure of the environment. Repeatable. Default: the run's, in its environment."
    )
    several("env_params", "name=value: difficulty of the environment, on top of the run's. Repeatable.")
    flags.DEFINE_enum("split", "test", ["test", "train", "all"], "Which tasks.", flag_values=values)
    number("max_tokens", 0, "Tokens an episode may have; 0: as in training, else what the environment needs.", 0)
    number("problems", 256, "Tasks.", 1)
    number("samples", 8, "Sampled tries of each, beside the greedy one.", 0)
    number("slots", 128, "Episodes in play at once.", 1)
    real("temperature", "Of sampling. Default: the run's.", 0.0, None)
    number("top_k", 0, "Sample among the k most probable tokens; 0: among all.", 0)
    real("top_p", "Sample among the most probable tokens that reach this mass. Default: all.", 0.0, 1.0)
    number("seed", 0, "Which tasks are drawn, and how tries are sampled.", 0)
    number("transcripts", 0, "Episodes to print.", 0)
    text("json", "", "File for the numbers.")
    text("compile_cache", "", "Folder that keeps compiled programs for the next time; empty: none.")


class Chosen(NamedTuple):
    """A policy and what it is to play."""

    step: int
    setup: Setup
    params: Any


def choose(values: flags.FlagValues) -> Chosen:
    """Restores the checkpoint and builds the environment.

    Raises:
      ValueError: no such run, checkpoint, environment or parameter; sizes out of range.
    """
    if not values.run:
        raise ValueError("--run=runs/NAME says which run to evaluate")
    folder = Path(values.run) / "checkpoints"
    step = _step(folder, values.step)
    notes = checkpoint.read_metadata(folder, step)
    try:
        trained = building.build(Settings(**notes["config"]["settings"]))
        phase = next(phase for phase in trained.phases if phase.name == notes["phase"])
    except (KeyError, TypeError, StopIteration) as error:
        raise CheckpointError(
            f"step {step} of {folder} was not written by this version of train.py: {error}"
        ) from error
    state = checkpoint.restore(folder, trained.abstract(phase), step).state
    return Chosen(step, _setup(values, trained), state.params["policy"])


def _step(folder: Path, wanted: str) -> int:
    if wanted not in ("latest", "best"):
        if not wanted.isdecimal():
            raise ValueError(f"--step must be a number, latest or best, got {wanted!r}")
        return int(wanted)
    found = checkpoint.latest(folder) if wanted == "latest" else checkpoint.best(folder, "eval_success")
    if found is None:
        raise ValueError(f"no usable checkpoint in {folder}" + (" with a held-out success" if wanted == "best" else ""))
    return found


def _setup(values: flags.FlagValues, trained: Setup) -> Setup:
    """The run's setup with another environment, sizes and temperature."""
    old = trained.settings
    same = not values.tasks and values.env in ("", building.env_name(old))
    env = {"env": values.env or old.env, "tasks": values.tasks or (old.tasks if same else "")}
    if values.tasks and not values.env:
        env["env"] = "tasks"
    options = tuple(values.env_option) or (old.env_option if same else ())
    changed = dataclasses.replace(
        old, **env, env_option=options, env_params=_on_top(old.env_params if same else (), tuple(values.env_params)),
        eval_problems=values.problems, eval_samples=values.samples, slots=values.slots, transcripts=values.transcripts,
        max_tokens=values.max_tokens or (trained.max_tokens if same else 0),
        temperature=old.temperature if values.temperature is None else values.temperature,
    )  # fmt: skip
    whole, notes = building.make_environment(changed)
    train_side, test_side = building.split(whole, 0.0 if values.split == "all" else old.held_out)
    max_tokens, more = building.choose_max_tokens(changed, whole, trained.codec)
    test = train_side if values.split == "train" else test_side
    return trained._replace(
        settings=changed, env=whole, test=test, max_tokens=max_tokens, notes=(*notes, *more)
    )  # fmt: skip


def _on_top(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    values = settings_lib.pairs("env_params", old) | settings_lib.pairs("env_params", new)
    return tuple(f"{name}={value}" for name, value in values.items())


def play(chosen: Chosen, values: flags.FlagValues) -> Evaluation:
    """The evaluation, on the host."""
    filters = {k: v for k, v in (("top_k", values.top_k), ("top_p", values.top_p)) if v}
    program = jax.jit(programs.evaluator(chosen.setup, **filters))
    key, temperature = jax.random.key(values.seed), np.float32(chosen.setup.settings.temperature)
    return jax.device_get(program(chosen.params, key, canonical_params(chosen.setup.env.params), temperature))


def run(values: flags.FlagValues) -> int:
    """Prints the table; the exit status."""
    try:
        chosen = choose(values)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in chosen.setup.notes:
        print(note)
    programs.use_cache(values.compile_cache)
    found = play(chosen, values)
    numbers = reporting.outcome(found, chosen.setup.test.spec.members)
    style = "ansi" if sys.stdout.isatty() else "text"
    for text in reporting.episodes(found, chosen.setup.codec, values.transcripts, style=style):
        print(text)
    print(f"{chosen.setup.test.name}: {values.problems} tasks, 95 % intervals")
    print(reporting.table({f"step {chosen.step} of {values.run}": numbers}))
    if values.json:
        about = {"run": values.run, "step": chosen.step, "env": chosen.setup.test.name, "seed": values.seed}
        write_atomic(values.json, json.dumps(about | numbers, indent=1) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    del argv
    logging.set_verbosity(logging.WARNING)
    return run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=training.parse)
