"""Figures of a benchmark: learning curves with their bands, final success, pass@k against the starting policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from bench_report import Outcome, curve
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from agentrl_jax.intervals import bootstrap, iqm

# Okabe-Ito, told apart also by readers who see few colours; grey keeps the baseline of small multiples back.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8B5A2B", "#000000")
_GREY = "#9a9a9a"
_PANELS = (
    ("pass_1", "held-out success", (-0.02, 1.02)),
    ("entropy", "entropy, nats per token", None),
    ("kl_start", "KL to the start, nats per token", None),
    ("length", "tokens per episode", None),
)
MANY = len(_COLOURS)


def draw(directory: Path, found: Sequence[Outcome], baseline: str) -> list[Path]:
    """All figures; ``found`` are the outcomes of every environment."""
    paths = []
    for arena in dict.fromkeys(outcome.arena for outcome in found):
        rows = [outcome for outcome in found if outcome.arena == arena]
        name = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in arena)
        for kind, make in (("learning", learning), ("pass_at_k", pass_curves), ("final", final)):
            figure = make(rows, baseline)
            figure.suptitle(arena, fontsize=12, fontweight="bold")
            paths.append(_save(figure, directory / f"{kind}-{name}.png"))
    return paths


def learning(rows: Sequence[Outcome], baseline: str) -> Figure:
    """Success, entropy, KL and length over tokens; above eight methods success alone, a panel each."""
    if len(rows) > MANY:
        return _multiples(rows, baseline, _learning_curve, "tokens", "held-out success")
    figure, axes = _figure(len(_PANELS), 2, (4.6, 2.9))
    for axis, (name, unit, limits) in zip(axes, _PANELS, strict=True):
        for outcome, colour in zip(rows, _COLOURS, strict=False):
            _band(axis, curve(outcome, name), colour, outcome.label)
        _dress(axis, "tokens", unit, limits)
    _legend(figure, axes[0])
    return figure


def pass_curves(rows: Sequence[Outcome], baseline: str) -> Figure:
    """pass@k at the end, and of the policy that all began from (dashed)."""
    if len(rows) > MANY:
        return _multiples(rows, baseline, _pass_curve, "k", "pass@k, held-out")
    figure, (axis,) = _figure(1, 1, (6.4, 4.0))
    for outcome, colour in zip(rows, _COLOURS, strict=False):
        _pass_curve(axis, outcome, colour, outcome.label)
    _pass_start(axis, rows[0])
    _dress(axis, "k, sampled tries", "pass@k, held-out", (-0.02, 1.02))
    _ticks(axis, rows[0])
    _legend(figure, axis)
    return figure


def final(rows: Sequence[Outcome], baseline: str) -> Figure:
    """Final success as bars with intervals, single seeds as dots, the baseline and the start as lines."""
    figure, (axis,) = _figure(1, 1, (7.0, 1.4 + 0.34 * len(rows)))
    at = np.arange(len(rows))
    spread = [bootstrap(outcome.final, iqm) for outcome in rows]
    middle = np.array([x.estimate for x in spread])
    ends = np.array([[x.estimate - x.low for x in spread], [x.high - x.estimate for x in spread]])
    colours = ["#7fb2d6" if outcome.label != baseline else "#c4c4c4" for outcome in rows]
    axis.barh(at, middle, color=colours, height=0.62)
    axis.errorbar(middle, at, xerr=np.maximum(ends, 0), fmt="none", ecolor="#222222", capsize=3, linewidth=1.2)
    for y, outcome in zip(at, rows, strict=True):
        axis.plot(outcome.final, np.full(len(outcome.final), y), "o", color="#D55E00", markersize=3, alpha=0.7)
    start = float(rows[0].success[0, 0])
    axis.axvline(start, color="#555555", linestyle="--", linewidth=1, label="start")
    for outcome, x in zip(rows, middle, strict=True):
        if outcome.label == baseline:
            axis.axvline(x, color="#555555", linewidth=1, label=baseline)
    axis.set_yticks(at, [outcome.label for outcome in rows])
    axis.invert_yaxis()
    _dress(axis, "held-out success, interquartile mean and 95 % interval; dots: seeds", "", None)
    axis.set_xlim(0, 1.02)
    _legend(figure, axis)
    return figure


def _multiples(
    rows: Sequence[Outcome], baseline: str, line: Callable[[Axes, Outcome, str, str], None], x: str, y: str
) -> Figure:
    """A panel a method, the baseline in grey behind it."""
    base = next((outcome for outcome in rows if outcome.label == baseline), None)
    figure, axes = _figure(len(rows), 4, (2.7, 2.0))
    for axis, outcome in zip(axes, rows, strict=True):
        if line is _pass_curve:
            _pass_start(axis, outcome)
        if base is not None and base is not outcome:
            line(axis, base, _GREY, baseline)
        line(axis, outcome, _COLOURS[0], outcome.label)
        _dress(axis, x, "", (-0.02, 1.02))
        axis.set_title(outcome.label, fontsize=8, loc="left")
        if line is _pass_curve:
            _ticks(axis, outcome)
    grey = f"; grey: {baseline}" if base is not None else ""
    dashed = "; dashed: start" if line is _pass_curve else ""
    figure.supylabel(y + grey + dashed, fontsize=9)
    return figure


def _learning_curve(axis: Axes, outcome: Outcome, colour: str, label: str) -> None:
    _band(axis, curve(outcome, "pass_1"), colour, label)


def _pass_curve(axis: Axes, outcome: Outcome, colour: str, label: str) -> None:
    ks = sorted(outcome.passes)
    spread = [bootstrap(outcome.passes[k][:, -1], np.mean) for k in ks]
    _band(axis, (np.array(ks), *(np.array(x) for x in zip(*spread, strict=True))), colour, label)


def _pass_start(axis: Axes, outcome: Outcome) -> None:
    ks = sorted(outcome.passes)
    start = [outcome.passes[k][0, 0] for k in ks]
    axis.plot(ks, start, color="#333333", linestyle="--", linewidth=1.2, marker="o", markersize=2.5, label="start")


def _ticks(axis: Axes, outcome: Outcome) -> None:
    ks = sorted(outcome.passes)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(ks, [str(k) for k in ks])


def _band(axis: Axes, found: tuple[np.ndarray, ...], colour: str, label: str) -> None:
    x, middle, low, high = found
    axis.plot(x, middle, color=colour, linewidth=1.6, marker="o", markersize=2.5, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _figure(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * min(columns, count), size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, min(columns, count), i + 1) for i in range(count)]


def _dress(axis: Axes, x: str, y: str, limits: tuple[float, float] | None) -> None:
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if limits is not None:
        axis.set_ylim(*limits)
    if x == "tokens":
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value else "0"))


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=8)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, format="png", facecolor="white", metadata={"Software": None})
    return path
