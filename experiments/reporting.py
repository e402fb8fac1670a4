"""What an evaluation says: numbers with intervals, tables, transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.codecs.base import Codec
from agentrl_jax.evaluate import Evaluation
from agentrl_jax.files import write_atomic
from agentrl_jax.intervals import pass_at_k_interval, wilson
from agentrl_jax.transcript import render

SOLVED = 0.999  # Success is 0 or 1 where an environment reports it, else a return of at least 1 up to rounding.
_SECTION = "=== step "


def outcome(evaluation: Evaluation, members: Sequence[str] = ()) -> dict[str, float]:
    """Flat numbers of an evaluation on the host, ready for a metrics row.

    ``success`` is that of the greedy tries, with a Wilson interval over problems, and ``success_NAME`` the same of the
    problems that each of the ``members`` of a mixture played; ``pass_k`` is the unbiased estimate from the sampled
    tries, with its interval. Rates, turns and tokens are of the greedy tries; ``sampled_*`` of the others.
    """
    solved = np.asarray(evaluation.success) >= SOLVED
    problems, tries = solved.shape
    greedy = wilson(int(solved[:, 0].sum()), problems)
    found = {"problems": problems, "samples": tries - 1} | _spread("success", greedy)
    for k in range(1, tries):
        found |= _spread(f"pass_{k}", pass_at_k_interval(tries - 1, solved[:, 1:].sum(1), k))
    for i, name in enumerate(members):
        mine = solved[np.asarray(evaluation.member)[:, 0] == i, 0]
        found |= _spread(f"success_{name}", wilson(int(mine.sum()), len(mine))) if len(mine) else {}
    for prefix, columns in (("", slice(0, 1)), ("sampled_", slice(1, None))):
        found |= {f"{prefix}{name}": value for name, value in _means(evaluation, columns, tries).items()}
    return {name: float(value) for name, value in found.items()}


def _means(evaluation: Evaluation, columns: slice, tries: int) -> dict[str, float]:
    if columns.start >= tries:
        return {}
    named = {"reward": evaluation.reward, "turns": evaluation.turns, "length": evaluation.length}
    named |= {"written": evaluation.written} | {k: v for k, v in evaluation.info.items() if k != "success"}
    found = {name: float(np.mean(np.asarray(value)[:, columns])) for name, value in named.items()}
    if "tool_calls" in evaluation.info:
        found["tool_rate"] = float(np.mean(np.asarray(evaluation.info["tool_calls"])[:, columns] > 0))
    truncated = np.asarray(evaluation.trajectory.truncated).reshape(*np.shape(evaluation.success), -1).any(-1)
    return found | {"truncated": float(np.mean(truncated[:, columns]))}


def _spread(name: str, interval: Sequence[float]) -> dict[str, float]:
    return {name: interval[0], f"{name}_low": interval[1], f"{name}_high": interval[2]}


def share(numbers: Mapping[str, Any], name: str) -> str:
    """``97.7 % [93.3, 99.2]``, or ``-`` where there is no such number."""
    if name not in numbers:
        return "-"
    text = f"{100 * numbers[name]:.1f} %"
    if f"{name}_low" in numbers:
        text += f" [{100 * numbers[f'{name}_low']:.1f}, {100 * numbers[f'{name}_high']:.1f}]"
    return text


def in_short(numbers: Mapping[str, Any]) -> str:
    """One line."""
    parts = [f"success {share(numbers, 'success')}"]
    if "tool_rate" in numbers:
        parts.append(f"tool use {numbers['tool_rate']:.0%}")
    return ", ".join([*parts, f"turns {numbers['turns']:.1f}"])


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Outcomes side by side, one column each by title; intervals are 95 %."""
    titles = list(columns)
    samples = max(int(numbers.get("samples", 0)) for numbers in columns.values())
    rows = [("success, greedy", [share(numbers, "success") for numbers in columns.values()])]
    for k in range(1, samples + 1):
        rows.append((f"pass@{k}, sampled", [share(numbers, f"pass_{k}") for numbers in columns.values()]))
    for name in dict.fromkeys(n for numbers in columns.values() for n in numbers if n.startswith("success_")):
        if not name.endswith(("_low", "_high")):
            rows.append((f"  {name.removeprefix('success_')}", [share(numbers, name) for numbers in columns.values()]))
    for label, name, form in _LINES:
        if any(name in numbers for numbers in columns.values()):
            rows.append((label, [_spell(numbers, name, form) for numbers in columns.values()]))
    widths = [max(len(title), *(len(row[1][i]) for row in rows)) for i, title in enumerate(titles)]
    lines = [" " * 26 + "  ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True))]
    for label, cells in rows:
        lines.append(label.ljust(26) + "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)


_LINES = (
    ("reward", "reward", "{:.3f}"),
    ("episodes that use a tool", "tool_rate", "{:.1%}"),
    ("tool calls", "tool_calls", "{:.2f}"),
    ("turns", "turns", "{:.2f}"),
    ("tokens written", "written", "{:.1f}"),
    ("tokens in all", "length", "{:.1f}"),
    ("cut short", "truncated", "{:.1%}"),
)


def _spell(numbers: Mapping[str, Any], name: str, form: str) -> str:
    return form.format(numbers[name]) if name in numbers else "-"


def episodes(evaluation: Evaluation, codec: Codec, count: int, *, style: str = "text") -> list[str]:
    """The first sampled try of each of the first problems (the greedy one where none was sampled), as text.

    The advantage is the try's reward against all sampled tries of its problem, ``(R - mean) / (std + 1e-6)``.
    """
    reward = np.asarray(evaluation.reward)
    problems, tries = reward.shape
    adv = np.full((problems, tries), np.nan)
    if tries > 2:
        sampled = reward[:, 1:]
        adv[:, 1:] = (sampled - sampled.mean(1, keepdims=True)) / (sampled.std(1, ddof=1, keepdims=True) + 1e-6)
    traj = jax.tree.map(np.asarray, evaluation.trajectory)
    segments = len(traj.length) // adv.size
    adv = np.repeat(adv.reshape(-1), segments)
    chosen = (problem * tries + min(1, tries - 1) for problem in range(min(count, problems)))
    return ["".join(_rows(traj, episode * segments, segments, codec, adv, style)) for episode in chosen]


def _rows(traj: Any, first: int, segments: int, codec: Codec, adv: np.ndarray, style: str) -> Iterator[str]:
    for row in range(first, first + segments):
        if row == first or traj.length[row]:
            yield render(traj, row, codec, adv, style)


def trim_transcripts(path: Path, step: int) -> None:
    """Drops what was written after ``step``: lines of episodes are indented, so only a section begins like one."""
    if not path.exists():
        return
    parts = path.read_text(encoding="utf-8").split(f"\n{_SECTION}")
    kept = parts[:1] + [part for part in parts[1:] if int(part.split(" ", 1)[0]) <= step]
    write_atomic(path, f"\n{_SECTION}".join(kept))


def add_transcripts(path: Path, step: int, title: str, texts: list[str]) -> None:
    """Appends a section; the file is replaced whole, so a kill leaves the old or the new one."""
    old = path.read_text(encoding="utf-8") if path.exists() else _LEGEND
    write_atomic(path, f"{old}\n{_SECTION}{step} {title}\n\n" + "\n".join(texts))


_LEGEND = """\
Episodes of the evaluations on held-out tasks: the first sampled try of the first few tasks.
"observation" is what the environment wrote (never trained on), "action" what the agent wrote. The advantage compares
the reward with those of the other sampled tries of the same task. Characters that cannot be printed are escaped.
"""
