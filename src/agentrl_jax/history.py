"""What is known of every task of a finite pool, and which tasks to roll for it.

A pool is the tasks ``0 .. pool - 1`` (``Start.task``: a task id names the same task in every step). Histories are
arrays of the pool's size, part of the algorithm's memory and so of the checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import selection
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.checks import check_at_least
from agentrl_jax.episodes import DRAW, by_group, right, spread, varied
from agentrl_jax.parts import Part, note
from agentrl_jax.types import Array, PyTree, Start, Trajectory


class Settled(NamedTuple):
    """``skip_settled``'s memory.

    Attributes:
      streak: ``int32[pool]``, latest visits in a row whose returns were all equal.
      easy: ``bool[pool]``, on the latest visit all were right.
      base_easy, base_hard: ``float32[]``, what the chances of being rolled decay by.
    """

    streak: Array
    easy: Array
    base_easy: Array
    base_hard: Array


class Epoch(NamedTuple):
    """``drop_solved``'s memory.

    Attributes:
      solved: ``bool[pool]``, on the latest visit all were right.
      order: ``int32[pool]``, the pool in random order, the tasks of this epoch first.
      count: ``int32[]``, how many these are.
      cursor: ``int32[]``, how many have been rolled.
    """

    solved: Array
    order: Array
    count: Array
    cursor: Array


def skip_settled(pool: int, oversample: int = 2) -> Part:
    """GRESO: tasks whose returns were all equal on their latest visits are likely to be skipped before they are rolled.

    A step draws ``groups * oversample`` tasks of the pool without replacement, skips each by
    ``selection.skip_probability`` of its streak and kind, and rolls the first ``groups`` that are left (skipped ones
    in the order drawn, where too few are). Tasks are easy (all right) or hard; the shares of rolled groups that are
    equal and of each kind tune its ``base`` (``selection.update_skip_base``, target split 1/3 to easy, 2/3 to hard).
    Notes ``skipped``, the share of the tasks drawn.

    Numbers: ``skip_target`` (equal groups aimed at, .25), ``skip_step`` (.01), ``skip_floor`` (least chance of being
    rolled, .01). The paper passes through its data in epochs and adapts the size of further rolls; here each step draws
    anew and ``oversample`` is static. Source: Zheng et al., Act Only When It Pays, 2025, arXiv 2506.02177.

    Raises:
      ValueError: ``oversample`` below 1, a pool smaller than what a step draws.
    """
    check_at_least(1, pool=pool, oversample=oversample)

    def init(key: Array, shape: Shape) -> Settled:
        del key
        drawn = shape.episodes // shape.group_size * oversample
        if pool < drawn:
            raise ValueError(f"pool must hold the {drawn} tasks that a step draws (groups * oversample), got {pool}")
        half = jnp.full((), 0.5, jnp.float32)
        return Settled(jnp.zeros(pool, jnp.int32), jnp.zeros(pool, bool), half, half)

    def collect(memory: Settled, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        drawn, skip = _candidates(memory, tools.groups * oversample, hyper, key)
        task = drawn[jnp.argsort(skip, stable=True)[: tools.groups]]
        traj = tools.roll(key, start=Start(task=spread(task, tools)))
        memory = _settle(memory, task, traj, tools, hyper)
        return memory, note(traj, tools.segments, skipped=jnp.mean(skip.astype(jnp.float32)))

    hyper = {"skip_target": 0.25, "skip_step": 0.01, "skip_floor": 0.01}
    return Part("skip_settled", collect=collect, hyper=hyper, needs=frozenset({"group"}), init=init)


def _candidates(memory: Settled, number: int, hyper: dict[str, Array], key: Array) -> tuple[Array, Array]:
    """``number`` different tasks of the pool, and whether each is to be skipped."""
    pool = memory.streak.shape[0]
    drawn = jax.random.permutation(jax.random.fold_in(key, DRAW), pool)[:number].astype(jnp.int32)
    base = jnp.where(memory.easy[drawn], memory.base_easy, memory.base_hard)
    chance = selection.skip_probability(memory.streak[drawn], base, floor=hyper["skip_floor"])
    return drawn, jax.random.uniform(jax.random.fold_in(key, DRAW + 1), (number,), jnp.float32) < chance


def _settle(memory: Settled, task: Array, traj: Trajectory, tools: Tools, hyper: dict[str, Array]) -> Settled:
    """The memory after the different tasks ``int32[groups]`` were rolled."""
    equal = ~varied(traj, tools)
    easy = jnp.all(by_group(right(traj, tools.segments), tools), axis=1)
    streak = selection.update_streak(memory.streak[task], equal, jnp.ones_like(equal))

    def tuned(base: Array, kind: Array, part: float) -> Array:
        share = jnp.mean((equal & kind).astype(jnp.float32))
        target = hyper["skip_target"] * part
        return selection.update_skip_base(base, share, target=target, step=hyper["skip_step"])

    return Settled(
        memory.streak.at[task].set(streak), memory.easy.at[task].set(easy),
        tuned(memory.base_easy, easy, 1 / 3), tuned(memory.base_hard, ~easy, 2 / 3),
    )  # fmt: skip


def drop_solved(pool: int) -> Part:
    """SRPO's history resampling: an epoch leaves out the tasks all of whose rollouts were right when last rolled.

    Epochs go through the pool in random order, every task at least once: the last step of an epoch is filled up with
    tasks from its beginning. Tasks that were all wrong stay, as mixed ones do. What has been left out stays out, until
    everything is solved: then the whole pool returns. Notes ``in_epoch``, the share of the pool that the epoch has.
    Source: Zhang et al., SRPO, 2025, arXiv 2504.14286, from a secondary source; that the pool returns is ours.

    Raises:
      ValueError: ``pool`` below 1.
    """
    check_at_least(1, pool=pool)

    def init(key: Array, shape: Shape) -> Epoch:
        del shape
        return _new_epoch(jnp.zeros(pool, bool), key)

    def collect(memory: Epoch, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        place = (memory.cursor + jnp.arange(tools.groups, dtype=jnp.int32)) % memory.count
        task = memory.order[place]
        traj = tools.roll(key, start=Start(task=spread(task, tools)))
        easy = jnp.all(by_group(right(traj, tools.segments), tools), axis=1)
        share = memory.count.astype(jnp.float32) / pool
        memory = _advance(memory, task, easy, jax.random.fold_in(key, DRAW))
        return memory, note(traj, tools.segments, in_epoch=share)

    return Part("drop_solved", collect=collect, init=init)


def _new_epoch(solved: Array, key: Array) -> Epoch:
    """All that is not solved, in random order; everything, where all is."""
    solved = solved & ~jnp.all(solved)
    order = jax.random.permutation(key, solved.shape[0]).astype(jnp.int32)
    order = order[jnp.argsort(solved[order], stable=True)]
    return Epoch(solved, order, jnp.sum(~solved, dtype=jnp.int32), jnp.zeros((), jnp.int32))


def _advance(memory: Epoch, task: Array, easy: Array, key: Array) -> Epoch:
    """The memory after the tasks ``int32[groups]`` were rolled; one rolled twice is solved if both groups say so."""
    seen = jnp.zeros_like(memory.solved).at[task].set(True)
    solved = jnp.where(seen, jnp.ones_like(memory.solved).at[task].min(easy), memory.solved)
    cursor = memory.cursor + task.shape[0]
    over = cursor >= memory.count
    going_on = memory._replace(solved=solved, cursor=cursor)
    return jax.tree.map(lambda new, old: jnp.where(over, new, old), _new_epoch(solved, key), going_on)
