"""What collectors are made of: episodes as numbers, which of them stay, and one rollout played in rounds.

``N`` is ``tools.episodes``; groups are equal and in order unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import control
from agentrl_jax.algorithm import Tools
from agentrl_jax.types import Array, PyTree, Start, Trajectory

DRAW = 1 << 20
"""First of the numbers by which a collector folds its own draws into the key; rolls use the small ones."""

Plan = Callable[[Array, Trajectory, PyTree], tuple[Array, Start, PyTree]]


# What episodes were like, one number each


def returns(traj: Trajectory, segments: int) -> Array:
    """What the environment paid every episode, ``float32[N]``."""
    return jnp.sum(traj.steps["reward"].reshape(traj.length.shape[0] // segments, -1), axis=1)


def total(traj: Trajectory, name: str, segments: int) -> Array:
    """A name of ``steps`` added up over the turns of every episode, ``float32[N]``."""
    return jnp.sum(traj.steps[name].reshape(traj.length.shape[0] // segments, -1), axis=1, dtype=jnp.float32)


def right(traj: Trajectory, segments: int) -> Array:
    """Whether every episode solved its task, ``bool[N]``: ``success`` (the return, where the environment reports none)
    above one half."""
    outcome = traj.steps.get("success", traj.steps["reward"]).astype(jnp.float32)
    return jnp.sum(outcome.reshape(traj.length.shape[0] // segments, -1), axis=1) > 0.5


def varied(traj: Trajectory, tools: Tools) -> Array:
    """Whether the environment paid the members of a group differently, ``bool[groups]``, for equal groups in order; a
    return that is not a number makes no group a varied one."""
    ret = by_group(returns(traj, tools.segments), tools)
    return jnp.max(ret, axis=1) > jnp.min(ret, axis=1)


def by_group(x: Array, tools: Tools) -> Array:
    """Numbers of episodes in equal groups, in order: ``[N] -> [groups, group_size]``."""
    return x.reshape(tools.groups, -1)


def spread(x: Array, tools: Tools) -> Array:
    """One value a group to each of its episodes: ``[groups] -> [N]``."""
    return jnp.repeat(x, tools.group_size, axis=0)


# Which episodes stay


def take_episodes(traj: Trajectory, index: Array, segments: int) -> Trajectory:
    """The episodes ``index``, ``int32[M]``, with all their rows, in that order; their ids stay."""
    rows = (index[:, None] * segments + jnp.arange(segments, dtype=index.dtype)).reshape(-1)
    return jax.tree.map(lambda x: x[rows], traj)


def where_episodes(which: Array, new: Trajectory, old: Trajectory, segments: int) -> Trajectory:
    """Episodes of ``new`` where ``which``, ``bool[N]``, else of ``old``."""
    rows = jnp.repeat(which, segments, axis=0)
    pick = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
    return jax.tree.map(pick, new, old)


def numbered(traj: Trajectory, group: Array, segments: int) -> Trajectory:
    """Episodes counted in order, in the groups ``int32[N]``."""
    rows = jnp.arange(traj.length.shape[0], dtype=jnp.int32)
    return traj._replace(episode=rows // segments, group=jnp.repeat(group.astype(jnp.int32), segments, axis=0))


def equal_groups(tools: Tools) -> Array:
    """Group ids of equal groups in order, ``int32[N]``."""
    return spread(jnp.arange(tools.groups, dtype=jnp.int32), tools)


def fresh_tasks(key: Array, tools: Tools) -> Array:
    """A new task for every group, the same for all its members: ``int32[N]``."""
    draw = jax.random.bits(jax.random.fold_in(key, DRAW), (tools.groups,), jnp.uint32) >> 1
    return spread(draw.astype(jnp.int32), tools)


def thrown(traj: Trajectory, rolled: Array, tools: Tools) -> Array:
    """Of ``rolled`` tokens those that ``traj`` did not keep, an episode of the step."""
    return (rolled - jnp.sum(traj.length)).astype(jnp.float32) / tools.episodes


# Rounds: one compiled rollout, played as often as needed


class Rounds(NamedTuple):
    """Rounds played, what was kept, what the plan keeps, and all tokens played, ``int32[]``."""

    number: Array
    traj: Trajectory
    state: PyTree
    rolled: Array


def blank(tools: Tools, key: Array, start: Start) -> Trajectory:
    """Zeros of the shapes of a rollout; nothing is played."""
    shapes = jax.eval_shape(lambda: tools.roll(key, start=start))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def play_rounds(tools: Tools, key: Array, plan: Plan, state: PyTree, limit: int) -> Rounds:
    """Plays again, in place, the episodes that ``plan`` asks for, at most ``limit`` times, until it asks for none.

    ``plan(round, trajectory so far, state) -> (bool[N] which, start, state)``. Round 0 fills the trajectory; a plan
    must ask for something then. Whoever needs no further round keeps all it has while others of a
    ``vmap`` play on.
    """

    def ask(now: Rounds) -> tuple[Array, Start, PyTree]:
        which, start, state = plan(now.number, now.traj, now.state)
        which &= now.number < limit
        return which, start._replace(active=which), state

    def play(now: Rounds) -> Rounds:
        which, start, state = ask(now)
        go = jnp.any(which)
        new = tools.roll(key, call=now.number, start=start)
        # Episodes that are never played are those of the first round: padding, not zeros.
        traj = where_episodes(which | (now.number == 0), new, now.traj, tools.segments)
        state = jax.tree.map(lambda a, b: jnp.where(go, a, b), state, now.state)
        return Rounds(now.number + go, traj, state, now.rolled + jnp.sum(new.length))

    zero = jnp.zeros((), jnp.int32)
    everyone = Start(active=jnp.ones(tools.episodes, bool))
    first = Rounds(zero, blank(tools, key, everyone), state, zero)
    return control.while_any(lambda now: jnp.any(ask(now)[0]), play, first)
