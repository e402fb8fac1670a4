"""A transform for long horizons: several tasks one after another in one episode."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.base import Environment, canonical
from agentrl_jax.envs.registry import memoised
from agentrl_jax.envs.wrappers import lifted, select, strong
from agentrl_jax.text import concat, resize, where
from agentrl_jax.types import Array, PyTree, Text

_ODD = np.uint32(0x9E3779B9)


class SeriesState(NamedTuple):
    """State of ``series``.

    Attributes:
      inner: the state of the task in play.
      tasks: the states and first observations of all tasks, stacked: drawn at reset, so that the members of a group
        meet the same ones.
      index, turn, solved: tasks behind, actions in the one in play, tasks solved; ``int32[]``.
      owed: reward that is paid at the end, ``float32[]``.
    """

    inner: PyTree
    tasks: PyTree
    index: Array
    turn: Array
    solved: Array
    owed: Array


def series(env: Environment, tasks: int, *, paid_at_end: bool = False) -> Environment:
    """Plays ``tasks`` tasks of ``env`` in one episode; where one is over, the next is shown behind its last reply.

    Rewards are those of the tasks divided by their number, when they are earned, or all at the last turn
    (``paid_at_end``): the return of an episode that ends is the same, and only what assigns credit to turns can tell
    the two apart. An episode cut by a limit of the rollout, not of the environment, is never paid what is owed.
    ``info["success"]`` is 1 in the last turn if every task was solved, ``info["solved"]`` in each turn that solved one.
    A task that ``env`` does not end within its ``max_turns`` is over then. The anchor tells equal tasks at different
    places apart.

    Raises:
      ValueError: fewer than two tasks; an environment with several seats or of a mixture (mix series instead), without
        ``info["success"]``, or with a part named ``solved``.
    """
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 2:
        raise ValueError(f"series of {env.name}: tasks must be an int of at least 2, got {tasks!r}")
    if env.spec.roles != 1 or env.spec.members:
        raise ValueError(f"series of {env.name}: it takes environments of one seat that are no mixture")
    names = dict(env.spec.info)
    if "success" not in names or "solved" in names:
        raise ValueError(f"series of {env.name}: info needs success and no part named solved, it has {sorted(names)}")
    return _series(env, tasks, bool(paid_at_end))


@memoised
def _series(env: Environment, tasks: int, paid_at_end: bool) -> Environment:
    capacity = 2 * env.spec.max_observation + 1
    info = (*env.spec.info, ("solved", "float32"))
    spec = env.spec._replace(max_observation=capacity, max_turns=tasks * env.spec.max_turns, info=info)

    def reset(key, params):
        drawn = jax.vmap(env.reset, (0, None))(jax.random.split(key, tasks), params)
        drawn = strong((drawn[0], jax.vmap(lambda ts: canonical(ts, env.spec))(drawn[1])))
        inner, first = _take(drawn, 0)
        zero = jnp.int32(0)
        state = SeriesState(inner, drawn, zero, zero, zero, jnp.float32(0.0))
        return state, canonical(first._replace(observation=resize(first.observation, capacity)[0]), spec)

    def step(key, state, action, params):
        inner, ts = env.step(key, state.inner, action, params)
        ts = canonical(ts, env.spec)
        info, turn = dict(ts.info or {}), state.turn + 1
        cut = ts.truncated | (~ts.terminated & (turn >= env.spec.max_turns))
        over = ts.terminated | cut
        index = state.index + over
        last = index >= tasks
        following, first = _take(state.tasks, jnp.minimum(index, tasks - 1))
        goes_on = over & ~last
        solved = (info["success"] > 0).astype(jnp.int32)
        total = state.solved + solved
        reward = state.owed + ts.reward / tasks
        pay = last | (not paid_at_end)
        after = SeriesState(
            strong(select(goes_on, following, inner)), state.tasks, index, jnp.where(over, 0, turn), total,
            jnp.where(pay, 0.0, reward),
        )  # fmt: skip
        return after, canonical(
            ts._replace(
                observation=_shown(ts.observation, first.observation, goes_on, capacity),
                reward=jnp.where(pay, reward, 0.0), terminated=last & ts.terminated, truncated=last & cut,
                restart=ts.restart & ~over, inputs=select(goes_on, first.inputs, ts.inputs),
                info={**info, "success": last & (total == tasks), "solved": solved},
            ),
            spec,
        )  # fmt: skip

    name = f"series({env.name},{tasks}{',paid_at_end' if paid_at_end else ''})"
    rest = lifted(env)
    if env.anchor is not None:
        inner_anchor = env.anchor
        rest["anchor"] = lambda state: inner_anchor(state.inner) + _ODD * state.index.astype(jnp.uint32)
    return env._replace(name=name, spec=spec, reset=reset, step=step, **rest)


def _take(tree: PyTree, index: Array | int) -> PyTree:
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), tree)


def _shown(reply: Text, following: Text, goes_on: Array, capacity: int) -> Text:
    """The reply; where the next task begins it stands on a line behind it, or alone where there was no reply."""
    alone = resize(following, capacity)[0]
    both, _ = concat(reply, b"\n", following, capacity=capacity)
    return where(goes_on, where(reply.length > 0, both, alone), resize(reply, capacity)[0])
