"""Transforms: functions from environment to environment; equal calls return the identical object."""

from agentrl_jax.envs.mixture import mixture
from agentrl_jax.envs.noise import noisy_reward
from agentrl_jax.envs.series import series
from agentrl_jax.envs.splits import check_split, held_out, is_test
from agentrl_jax.envs.thinking import thinking
from agentrl_jax.envs.wrappers import turn_limit, with_reward

__all__ = [
    "check_split",
    "held_out",
    "is_test",
    "mixture",
    "noisy_reward",
    "series",
    "thinking",
    "turn_limit",
    "with_reward",
]
