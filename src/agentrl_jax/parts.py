"""Parts of an algorithm: where experience comes from, what is done to it, and what is kept between steps.

A part brings its own memory, numbers and needs, so that any set of parts makes an ``Algorithm`` (``join``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import metrics as metrics_lib
from agentrl_jax import scoring
from agentrl_jax.algorithm import Shape, Tools, no_memory
from agentrl_jax.stages import Stage
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Trajectory

Collect = Callable[[PyTree, Tools, dict[str, Array], Array], tuple[PyTree, Trajectory]]


class Part(NamedTuple):
    """One ingredient of an algorithm.

    Attributes:
      name: key of its memory; no two parts of an algorithm share one.
      stage: ``(memory, Batch, Tools, hyper, key) -> (memory, Batch, Metrics)``, with its own memory; or None.
      collect: ``(memory, Tools, hyper, key) -> (memory, Trajectory)``, with its own memory; or None.
      hyper: the numbers it reads, and their defaults.
      needs: as ``Algorithm.needs``.
      init: ``(key, Shape) -> memory``.
    """

    name: str
    stage: Stage | None = None
    collect: Collect | None = None
    hyper: dict[str, float] = {}  # noqa: RUF012 - never mutated: a NamedTuple default
    needs: frozenset[str] = frozenset()
    init: Callable[[Array, Shape], PyTree] = no_memory


class Joined(NamedTuple):
    """What ``join`` makes of parts: fields of ``Algorithm``."""

    prepare: Callable[..., tuple[PyTree, Batch, Metrics]]
    collect: Collect
    hyper: dict[str, float]
    needs: frozenset[str]
    init: Callable[[Array, Shape], dict[str, PyTree]]


def join(parts: Sequence[Part], *, teacher: bool = False) -> Joined:
    """``collect`` of the one part that has it (a plain rollout, where none has), then every stage in order.

    Memory is ``{part name: its memory}``. With ``teacher`` the expert's tokens enter the loss too.

    Raises:
      ValueError: two parts of one name, two that collect, or two defaults of one number.
    """
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two parts are called {twice[0]!r}")
    collectors = [part for part in parts if part.collect is not None]
    if len(collectors) > 1:
        raise ValueError(f"{collectors[0].name!r} and {collectors[1].name!r} both decide what is rolled: choose one")
    hyper: dict[str, float] = {}
    for part in parts:
        for name, value in part.hyper.items():
            if hyper.setdefault(name, value) != value:
                raise ValueError(f"{part.name!r} reads {name} = {value}, another part {name} = {hyper[name]}")

    def init(key: Array, shape: Shape) -> dict[str, PyTree]:
        keys = jax.random.split(key, max(len(parts), 1))
        return {part.name: part.init(k, shape) for part, k in zip(parts, keys, strict=False)}

    def prepare(
        memory: dict[str, PyTree], traj: Trajectory, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[dict[str, PyTree], Batch, Metrics]:
        memory, metrics = dict(memory), {}
        batch = scoring.as_batch(traj, traj.mask if teacher else None)
        for i, part in enumerate(parts):
            if part.stage is not None:
                own, batch, more = part.stage(memory[part.name], batch, tools, hyper, jax.random.fold_in(key, i))
                memory, metrics = {**memory, part.name: own}, metrics_lib.merge(metrics, more)
        return memory, batch, metrics

    return Joined(prepare, _collector(collectors), hyper, frozenset().union(*(part.needs for part in parts)), init)


def _collector(collectors: Sequence[Part]) -> Collect:
    def collect(
        memory: dict[str, PyTree], tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[dict[str, PyTree], Trajectory]:
        if not collectors:
            return memory, tools.roll(key)
        part = collectors[0]
        assert part.collect is not None
        own, traj = part.collect(memory[part.name], tools, hyper, key)
        return {**memory, part.name: own}, traj

    return collect


def note(traj: Trajectory, segments: int = 1, **values: Any) -> Trajectory:
    """Keeps a number an episode, ``float32[N]`` each, as ``traj.steps[name]`` on its first turn: it then counts among
    the metrics of the rollout."""
    steps = dict(traj.steps)
    for name, value in values.items():
        rows = jnp.zeros(traj.steps["played"].shape, jnp.float32)
        steps[name] = rows.at[::segments, 0].set(jnp.asarray(value, jnp.float32))
    return traj._replace(steps=steps)


def noted(traj: Trajectory, name: str, segments: int = 1) -> Array:
    """The number of every episode that ``note`` kept, ``float32[N]``."""
    return traj.steps[name][::segments, 0]
