"""A split by content into training and held-out tasks, for generated tasks and files alike."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.control import while_any
from agentrl_jax.envs.base import Environment, canonical, canonical_params
from agentrl_jax.envs.registry import memoised
from agentrl_jax.envs.wrappers import lifted, select, strong
from agentrl_jax.text import hash_
from agentrl_jax.types import Array, PyTree, Text


class SplitState(NamedTuple):
    """``inner``: the environment's own state. ``miss``: no task of the wanted side was found, ``bool[]``."""

    inner: PyTree
    miss: Array


_SPLITS = ("train", "test")
_MISS = 1e-9


def is_test(observation: Text, fraction: float) -> Array:
    """Whether a first observation is on the test side: ``bool[]``, by content alone, for a share ``fraction``."""
    return hash_(observation) < jnp.uint32(min(round(fraction * 2**32), 2**32 - 1))


def held_out(env: Environment, split: str = "train", fraction: float = 0.1) -> Environment:
    """Plays only the tasks of one side of a split by content: ``test`` is a ``fraction`` of first observations.

    The side is a hash of the first observation, so equal prompts are always on the same side and evaluation never
    meets a training task, for generated tasks and files alike. ``reset`` draws again until the side is right, at most
    ``n = ceil(log(1e-9) / log(1 - p))`` times with ``p`` the side's share: with many distinct tasks it fails with
    probability ``1e-9``. A failed reset plays a task of the other side and says so: ``info["split_miss"]`` is 1 in
    every turn of the episode. ``check_split`` finds environments with too few tasks beforehand.

    Raises:
      ValueError: ``split`` is neither ``"train"`` nor ``"test"``; ``fraction`` outside ``(0, 1)``.
    """
    if split not in _SPLITS:
        raise ValueError(f"held_out of {env.name}: split must be one of {_SPLITS}, got {split!r}")
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"held_out of {env.name}: fraction must be in (0, 1), got {fraction!r}")
    if "split_miss" in dict(env.spec.info):
        raise ValueError(f"held_out of {env.name}: it is split already")
    return _held_out(env, split, float(fraction))


@memoised
def _held_out(env: Environment, split: str, fraction: float) -> Environment:
    share = fraction if split == "test" else 1.0 - fraction
    limit = max(1, math.ceil(math.log(_MISS) / math.log1p(-share)))
    spec = env.spec._replace(info=(*env.spec.info, ("split_miss", "float32")))

    def marked(inner, ts, miss):
        ts = canonical(ts, spec)
        return SplitState(inner, miss), ts._replace(info={**(ts.info or {}), "split_miss": miss.astype(jnp.float32)})

    def reset(key, params):
        def draw(attempt):
            state, ts = env.reset(jax.random.fold_in(key, attempt), params)
            return strong((state, canonical(ts, env.spec)))

        def needs(carry):
            attempt, (_, ts) = carry
            return (is_test(ts.observation, fraction) != (split == "test")) & (attempt < limit)

        def again(carry):
            attempt, old = carry
            more = needs(carry)
            return attempt + more, select(more, draw(attempt), old)

        _, (state, ts) = while_any(needs, again, (jnp.int32(1), draw(0)))
        return marked(state, ts, is_test(ts.observation, fraction) != (split == "test"))

    def step(key, state, action, params):
        return marked(*env.step(key, state.inner, action, params), state.miss)

    name = f"held_out({env.name},{split},{fraction:g})"
    return env._replace(name=name, spec=spec, reset=reset, step=step, **lifted(env))


def check_split(
    env: Environment, fraction: float = 0.1, *, draws: int = 4096, params: PyTree = None
) -> tuple[int, int]:
    """Draws tasks of an unsplit environment on the host: the number of distinct first observations, ``(train, test)``.

    Raises:
      ValueError: none of the drawn tasks is on one of the sides.
    """
    params = canonical_params(env.params if params is None else params)

    def one(key):
        observation = canonical(env.reset(key, params)[1], env.spec).observation
        return observation, is_test(observation, fraction)

    # Run once: compiling is the cost, not running.
    draw = jax.jit(jax.vmap(one), compiler_options={"xla_backend_optimization_level": 0})
    seen, test = jax.device_get(draw(jax.random.split(jax.random.key(0), draws)))
    sides: tuple[set[bytes], set[bytes]] = (set(), set())
    for data, length, side in zip(seen.data, seen.length, test, strict=True):
        sides[int(side)].add(data[:length].tobytes())
    train, held = map(len, sides)
    if not train or not held:
        raise ValueError(
            f"{env.name}: of {draws} draws, {train + held} tasks are different, {train} of them on the train side and "
            f"{held} on the test side; both need one: more tasks, or another fraction than {fraction:g}"
        )
    return train, held
