"""What a run leaves to read: curves, the summary, where everything is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import reporting
from building import RL, SUPERVISED, Setup, env_name

from agentrl_jax import plotting
from agentrl_jax.files import write_atomic
from agentrl_jax.logging import read_metrics

TRANSCRIPTS, CURVE, COLD_START = "transcripts.txt", "learning_curve.png", "cold_start.png"
_COLD_START = (
    plotting.Panel("Loss", "nats per token of the teacher", (("supervised_loss", "loss"),)),
    plotting.Panel("Exploration", "nats per token", (("entropy", "entropy"),)),
)
_PANELS = (
    plotting.Panel(
        "Success",
        "share of episodes",
        (("success", "training tasks"), ("eval_success", "held-out, greedy"), ("eval_pass_1", "held-out, sampled")),
        (-0.02, 1.02),
    ),
    plotting.Panel("Reward", "per episode", (("reward", "training"), ("eval_reward", "held-out, greedy"))),
    *plotting.PANELS[1:],
)


def summarize(setup: Setup, directory: Path, started: float) -> str:
    """Draws the curves, writes ``summary.json``, and returns one screen of text."""
    rows = read_metrics(directory)
    what = f"{env_name(setup.settings)}, {setup.phases[-1].algorithm.name}"
    _draw(setup, directory, rows, what)
    evaluations = _evaluations(setup, rows)
    seconds = _seconds(rows) | {"this session": time.monotonic() - started}
    summary = {"step": rows[-1]["step"], "seconds": seconds, "seed": setup.settings.seed, "evaluations": evaluations}
    write_atomic(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    used = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines = [f"\n{what}, seed {setup.settings.seed}; held-out tasks, 95 % intervals", reporting.table(evaluations)]
    return "\n".join([*lines, f"time: {used}", *_files(directory)])


def _draw(setup: Setup, directory: Path, rows: list[dict[str, Any]], what: str) -> None:
    """A figure a phase: the cold start has many more steps than RL, and would leave it no room."""
    for phase in setup.phases:
        # RL begins where the evaluation before it stands.
        own = [
            {**row, "phase": phase.name}
            for row in rows
            if phase.first + (phase.name == SUPERVISED) <= row["step"] <= phase.last
        ]
        name, panels = (COLD_START, _COLD_START) if phase.name == SUPERVISED else (CURVE, _PANELS)
        if all(row.get("reward") == row.get("success") for row in own):
            panels = [panel for panel in panels if panel.title != "Reward"]
        plotting.learning_curve(directory / name, own, panels=panels, title=what if name == CURVE else "cold start")


def _evaluations(setup: Setup, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Outcomes by title: before RL and after it, as far as there are such."""
    start = setup.phases[-1].first if setup.phases[-1].name == RL else -1
    found = {}
    for row in rows:
        if "eval_success" in row:
            title = "before RL" if row["step"] <= start else "after RL" if start >= 0 else "at the end"
            found[title] = {name[5:]: value for name, value in row.items() if name.startswith("eval_")}
    return found


def _seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Wall time by phase, over all sessions; waiting for the compiler apart."""
    found = {}
    for row in rows:
        found[row["phase"]] = found.get(row["phase"], 0.0) + row.get("seconds", 0.0)
    for title, name in (("evaluation", "eval_seconds"), ("waiting for the compiler", "compile_seconds")):
        found[title] = sum(row.get(name, 0.0) for row in rows)
    return found


def _files(directory: Path) -> list[str]:
    names = (CURVE, COLD_START, TRANSCRIPTS, "metrics.jsonl", "config.json", "checkpoints/", "tensorboard/")
    there = [name for name in names if (directory / name).exists()]
    return [
        f"files: {directory}/ with {', '.join(there)}",
        f"next:  python experiments/evaluate.py --run={directory}   (any checkpoint, any environment)",
    ]
