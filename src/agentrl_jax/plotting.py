"""Learning curves as PNG files, without a display and without global state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from agentrl_jax.intervals import bootstrap_band, iqm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

# Okabe-Ito: told apart also by readers who see few colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_SHADES = {"supervised": "#E69F00", "rl": "#0072B2"}
_TITLES = {"supervised": "supervised", "rl": "RL"}
_GRID = {"color": "#d0d0d0", "linewidth": 0.6}
_STATISTICS: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "iqm": iqm}


class Panel(NamedTuple):
    """One plot of a figure.

    Attributes:
      title: above it.
      unit: label of the vertical axis.
      series: ``(metric, label)`` pairs; those that no row has are left out.
      limits: of the vertical axis, or None.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    limits: tuple[float, float] | None = None


PANELS = (
    Panel("Task", "share of episodes, reward", (("success", "success"), ("reward", "reward"))),
    Panel(
        "Tool use",
        "per episode",
        (("tool_rate", "share with a call"), ("tool_calls", "tool calls"), ("turns", "turns")),
    ),
    Panel("Exploration", "nats per token", (("entropy", "entropy"),)),
    Panel("Length", "tokens per episode", (("length", "all tokens"), ("written", "written by the agent"))),
)


def learning_curve(
    path: str | os.PathLike[str], rows: Rows, *, panels: Sequence[Panel] = PANELS, title: str = "", smooth: int = 1
) -> Path:
    """Writes a PNG of the metrics over training steps, one panel a kind, phases shaded.

    Args:
      path: of the PNG.
      rows: of ``logging.read_metrics``: ``step``, metrics, and ``phase`` where there are several. A missing or
        non-finite value is left out, and its neighbours are joined.
      panels: those without any series in ``rows`` are left out.
      title: above all.
      smooth: steps of a centred moving average; the raw values stay behind it, faint.

    Raises:
      ValueError: there is no row, no panel has anything to show, or ``smooth`` is below 1.
    """
    if smooth < 1:
        raise ValueError(f"smooth is {smooth}; allowed are 1 and above")
    present = {name for row in rows for name in row}
    shown = [panel for panel in panels if any(name in present for name, _ in panel.series)]
    if not shown:
        wanted = sorted({name for panel in panels for name, _ in panel.series})
        raise ValueError(f"nothing to plot in {len(rows)} rows: looked for {wanted}, found {sorted(present)}")
    columns = min(2, len(shown))
    figure, axes = _figure(-(-len(shown) // columns), columns, len(shown))
    steps = np.array([row["step"] for row in rows])
    for axis, panel in zip(axes, shown, strict=True):
        _shade(axis, rows)
        for colour, (name, label) in zip(_COLOURS, panel.series, strict=False):
            if name in present:
                _series(axis, steps, _column(rows, name), label, colour, smooth)
        _dress(axis, panel.title, panel.unit, panel.limits)
        axis.legend(frameon=False, loc="best", fontsize=9)
    _shade_names(axes[0], rows)
    return _save(figure, path, title)


def curves_with_interval(
    path: str | os.PathLike[str],
    curves: Mapping[str, ArrayLike],
    *,
    steps: ArrayLike | None = None,
    statistic: str = "mean",
    confidence: float = 0.95,
    resamples: int = 1000,
    title: str = "",
    unit: str = "success rate",
    limits: tuple[float, float] | None = None,
) -> Path:
    """Writes a PNG of several methods: a statistic over seeds with its percentile bootstrap band.

    Args:
      path: of the PNG.
      curves: ``{label: [seeds, steps]}``, finite; numbers of seeds may differ. One seed gets no band.
      steps: horizontal positions, ``[steps]``; default 1, 2, ...
      statistic: ``"mean"`` or ``"iqm"``, the interquartile mean.
      confidence: of the band.
      resamples: of the bootstrap.
      title: above it.
      unit: label of the vertical axis.
      limits: of the vertical axis, or None.

    Raises:
      ValueError: no curves, an unknown statistic, shapes that do not fit, or values that are not finite.
    """
    if not curves:
        raise ValueError("there are no curves to plot")
    if statistic not in _STATISTICS:
        raise ValueError(f"statistic is {statistic!r}; allowed are {', '.join(_STATISTICS)}")
    figure, (axis,) = _figure(1, 1, 1)
    for index, (label, values) in enumerate(curves.items()):
        x = np.asarray(values, np.float64)
        estimate, low, high = bootstrap_band(x, _STATISTICS[statistic], confidence=confidence, resamples=resamples)
        at = np.arange(1, x.shape[1] + 1) if steps is None else np.asarray(steps)
        if at.shape != (x.shape[1],):
            raise ValueError(f"{label!r} has {x.shape[1]} steps, but steps has shape {at.shape}")
        colour = _COLOURS[index % len(_COLOURS)]
        axis.plot(at, estimate, color=colour, linewidth=1.8, label=f"{label} (n = {x.shape[0]})")
        axis.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    name = {"mean": "mean", "iqm": "interquartile mean"}[statistic]
    _dress(axis, f"{name} over seeds, {confidence:.0%} bootstrap interval", unit, limits)
    axis.legend(frameon=False, loc="best", fontsize=9)
    return _save(figure, path, title)


def _figure(height: int, width: int, count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.6 + 3.9 * max(width, 1.5), 0.4 + 2.5 * max(height, 1.35)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(height, width, i + 1) for i in range(count)]


def _save(figure: Figure, path: str | os.PathLike[str], title: str) -> Path:
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=130, format="png", facecolor="white", metadata={"Software": None})
    return Path(path)


def _dress(axis: Axes, title: str, unit: str, limits: tuple[float, float] | None) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("training step", fontsize=9)
    axis.set_ylabel(unit, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(True, **_GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
    if limits is not None:
        axis.set_ylim(*limits)


def _column(rows: Rows, name: str) -> np.ndarray:
    """A metric as floats, NaN where it is missing, not a number, or not finite."""
    values = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        value = row.get(name)
        if isinstance(value, int | float) and np.isfinite(value):
            values[i] = value
    return values


def _series(axis: Axes, steps: np.ndarray, values: np.ndarray, label: str, colour: str, smooth: int) -> None:
    there = np.isfinite(values)  # A metric written every few steps is joined up.
    marker = "o" if there.sum() <= 30 else None
    if smooth > 1:
        axis.plot(steps[there], values[there], color=colour, alpha=0.25, linewidth=0.8)
        axis.plot(steps[there], _moving_average(values[there], smooth), color=colour, linewidth=1.8, label=label)
    else:
        axis.plot(steps[there], values[there], color=colour, linewidth=1.6, marker=marker, markersize=2.5, label=label)


def _moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """Centred; at the ends over what there is."""
    kernel = np.ones(min(width, max(len(values), 1)))
    weight = np.convolve(np.ones(len(values)), kernel, mode="same")
    return np.convolve(values, kernel, mode="same") / weight


def _spans(rows: Rows) -> list[tuple[str, float, float]]:
    """``(phase, first, last)``, neighbours touching halfway."""
    spans: list[tuple[str, float, float]] = []
    for row in rows:
        phase, step = str(row.get("phase", "")), float(row["step"])
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], step)
        else:
            edge = (spans[-1][2] + step) / 2 if spans else step
            if spans:
                spans[-1] = (spans[-1][0], spans[-1][1], edge)
            spans.append((phase, edge, step))
    return spans


def _shade(axis: Axes, rows: Rows) -> None:
    spans = _spans(rows)
    for index, (phase, first, last) in enumerate(spans):
        if phase and len(spans) > 1:
            axis.axvspan(first, last, color=_SHADES.get(phase, _COLOURS[index % 7]), alpha=0.07, linewidth=0)


def _shade_names(axis: Axes, rows: Rows) -> None:
    spans = _spans(rows)
    for phase, first, _ in spans if len(spans) > 1 else ():
        axis.annotate(
            _TITLES.get(phase, phase),
            (first, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -9),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
