"""A transform that pays an estimate in place of the reward, as a learned reward model would."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_at_least
from agentrl_jax.envs.base import Environment, canonical
from agentrl_jax.envs.registry import memoised


def noisy_reward(env: Environment, std: float = 0.3) -> Environment:
    """Adds normal noise of deviation ``std`` to the reward of the step that ends an episode.

    ``info["exact_reward"]`` keeps the environment's own reward of every step, for evaluation, and tells algorithms
    that mistrust the reward (PF-PPO) that they may. An episode that meets a limit of the rollout, not of the
    environment, is paid without noise.

    Raises:
      ValueError: a negative ``std``; the environment has a part of that name already.
    """
    check_at_least(0.0, std=std)
    if "exact_reward" in dict(env.spec.info):
        raise ValueError(f"noisy_reward of {env.name}: its info has exact_reward already")
    return _noisy_reward(env, float(std))


@memoised
def _noisy_reward(env: Environment, std: float) -> Environment:
    spec = env.spec._replace(info=(*env.spec.info, ("exact_reward", "float32")))

    def reset(key, params):
        state, ts = env.reset(key, params)
        return state, canonical(ts, spec)

    def step(key, state, action, params):
        key, noise_key = jax.random.split(key)
        after, ts = env.step(key, state, action, params)
        ts = canonical(ts, env.spec)
        over = ts.terminated | ts.truncated
        noise = std * jax.random.normal(noise_key, jnp.shape(ts.reward), jnp.float32)
        info = {**(ts.info or {}), "exact_reward": jnp.sum(ts.reward)}
        return after, canonical(ts._replace(reward=ts.reward + jnp.where(over, noise, 0.0), info=info), spec)

    return env._replace(name=f"noisy_reward({env.name},{std:g})", spec=spec, reset=reset, step=step)
