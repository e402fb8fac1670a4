"""Transforms that wrap one environment: ``turn_limit`` and ``with_reward``, and what wrapping needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.envs.base import Environment, canonical
from agentrl_jax.envs.registry import memoised
from agentrl_jax.types import Array, PyTree, Text, TimeStep

Reward = Callable[[PyTree, Text, PyTree, TimeStep], Any]


def select(where: Array, new: PyTree, old: PyTree) -> PyTree:
    """``new`` where the scalar ``where`` holds, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(where, a, b), new, old)


def strong(tree: PyTree) -> PyTree:
    """Without weak types, so that branches and loops agree on what they carry."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), tree)


def lifted(env: Environment) -> dict[str, Any]:
    """``expert``, ``anchor`` and ``privileged`` of ``env`` for a state that holds its state in ``inner``."""
    expert, anchor, privileged = env.expert, env.anchor, env.privileged
    return {
        "expert": expert and (lambda key, state, params: expert(key, state.inner, params)),
        "anchor": anchor and (lambda state: anchor(state.inner)),
        "privileged": privileged and (lambda state: privileged(state.inner)),
    }


class TurnState(NamedTuple):
    """``inner``: the environment's own state. ``turn``: actions so far, ``int32[]``."""

    inner: PyTree
    turn: Array


def turn_limit(env: Environment, turns: int) -> Environment:
    """Cuts an episode after ``turns`` actions: ``truncated`` is set there unless the task is over.

    A context restart at the cut is dropped: no row follows.

    Raises:
      ValueError: ``turns`` outside ``[1, env.spec.max_turns]``.
    """
    if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= env.spec.max_turns:
        raise ValueError(f"turn_limit of {env.name}: turns must be an int in [1, {env.spec.max_turns}], got {turns!r}")
    return _turn_limit(env, turns)


@memoised
def _turn_limit(env: Environment, turns: int) -> Environment:
    def reset(key, params):
        state, ts = env.reset(key, params)
        return TurnState(state, jnp.int32(0)), ts

    def step(key, state, action, params):
        inner, ts = env.step(key, state.inner, action, params)
        turn = state.turn + 1
        late = (turn >= turns) & jnp.logical_not(ts.terminated)
        return TurnState(inner, turn), ts._replace(truncated=ts.truncated | late, restart=ts.restart & ~late)

    name, spec = f"turn_limit({env.name},{turns})", env.spec._replace(max_turns=turns)
    return env._replace(name=name, spec=spec, reset=reset, step=step, **lifted(env))


def with_reward(env: Environment, fn: Reward, *, parts: Sequence[str] = ()) -> Environment:
    """Replaces the reward by ``fn(state_before, action, state_after, timestep)``, or adds named parts to ``info``.

    Without ``parts``, ``fn`` returns the reward. With them it returns a dict with exactly these names, float32
    scalars that are recorded per turn, and optionally ``"reward"``, which replaces the reward; parts are 0 at reset.

    Raises:
      ValueError: a part's name is taken, repeated or ``"reward"``; (when traced) ``fn`` returns other names.
    """
    parts = tuple(parts)
    taken = [name for name in parts if name == "reward" or name in dict(env.spec.info) or parts.count(name) > 1]
    if taken:
        raise ValueError(f"with_reward of {env.name}: part names {taken} are taken or repeated; parts={parts}")
    return _with_reward(env, fn, parts)


@memoised
def _with_reward(env: Environment, fn: Reward, parts: tuple[str, ...]) -> Environment:
    spec = env.spec._replace(info=env.spec.info + tuple((name, "float32") for name in parts))

    def reset(key, params):
        state, ts = env.reset(key, params)
        return state, canonical(ts, spec)

    def step(key, state, action, params):
        after, ts = env.step(key, state, action, params)
        ts = canonical(ts, env.spec)
        found = fn(state, action, after, ts)
        if parts:
            extra = _parts(env.name, found, parts)
            found = extra.pop("reward", ts.reward)
            ts = ts._replace(info={**(ts.info or {}), **extra})
        return after, canonical(ts._replace(reward=found), spec)

    label = getattr(fn, "__name__", type(fn).__name__)
    return env._replace(name=f"with_reward({env.name},{label})", spec=spec, reset=reset, step=step)


def _parts(env: str, found: Any, parts: tuple[str, ...]) -> dict[str, Array]:
    names = set(found) if isinstance(found, dict) else None
    if names is None or names - {"reward"} != set(parts):
        got = sorted(names) if names is not None else type(found).__name__
        raise ValueError(f"with_reward of {env}: the function must return a dict with {sorted(parts)}, got {got}")
    return dict(found)
