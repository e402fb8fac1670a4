"""Environments: the contract, the registry, the transforms and the conformance suite."""

from agentrl_jax.envs.base import Environment, EnvSpec, canonical, canonical_params
from agentrl_jax.envs.registry import make, names, register
from agentrl_jax.envs.testing import check_env
from agentrl_jax.envs.transforms import held_out, mixture, noisy_reward, series, thinking, turn_limit, with_reward

__all__ = [
    "EnvSpec",
    "Environment",
    "canonical",
    "canonical_params",
    "check_env",
    "held_out",
    "make",
    "mixture",
    "names",
    "noisy_reward",
    "register",
    "series",
    "thinking",
    "turn_limit",
    "with_reward",
]
