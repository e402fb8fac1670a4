"""A transform that lets an agent think before it acts, with a teacher who does so at a random length."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.envs.base import Environment
from agentrl_jax.envs.registry import memoised
from agentrl_jax.text import concat, last_line, resize, where
from agentrl_jax.types import Text

_DOT = ord(".")


def thinking(env: Environment, most: int = 8) -> Environment:
    """Only the last line of an action reaches ``env``; its teacher begins with a line of 0 to ``most`` dots, uniformly.

    The dots have no effect on anything, so a policy that learnt them and then changes their number was moved by its
    learning rule alone: this shows the length bias of Liu et al. (2025, Dr. GRPO, arXiv:2503.20783).

    Raises:
      ValueError: ``most`` below 1.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"thinking of {env.name}: most must be an int of at least 1, got {most!r}")
    return _thinking(env, most)


@memoised
def _thinking(env: Environment, most: int) -> Environment:
    capacity = env.spec.max_action + most + 1

    def step(key, state, action, params):
        return env.step(key, state, resize(last_line(action), env.spec.max_action)[0], params)

    def expert(key, state, params):
        assert env.expert is not None
        length_key, key = jax.random.split(key)
        said = env.expert(key, state, params)
        count = jax.random.randint(length_key, (), 0, most + 1)
        dots = Text(jnp.where(jnp.arange(most) < count, _DOT, 0).astype(jnp.uint8), count)
        thought, _ = concat(dots, b"\n", said, capacity=capacity)
        return where(count > 0, thought, resize(said, capacity)[0])

    return env._replace(
        name=f"thinking({env.name},{most})", spec=env.spec._replace(max_action=capacity), step=step,
        expert=env.expert and expert,
    )  # fmt: skip
