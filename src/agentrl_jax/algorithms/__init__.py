"""Presets by name: ``make("grpo", eps_high=0.28)``; ``names()`` lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.grpo import grpo
from agentrl_jax.algorithms.ppo import ppo
from agentrl_jax.algorithms.preference import online_dpo
from agentrl_jax.algorithms.reinforce import reinforce, rloo
from agentrl_jax.algorithms.supervised import behavior_cloning

PRESETS: dict[str, Callable[..., Algorithm]] = {
    f.__name__: f for f in (reinforce, rloo, grpo, ppo, online_dpo, behavior_cloning)
}


def names() -> tuple[str, ...]:
    """The presets that ``make`` knows."""
    return tuple(sorted(PRESETS))


def make(name: str, **options: Any) -> Algorithm:
    """A preset by name, with any of its keywords changed.

    Raises:
      ValueError: an unknown preset or keyword; the message lists what there is.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(names())}")
    known = tuple(inspect.signature(PRESETS[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{name} has no option {unknown}; it has: {', '.join(known)}")
    return PRESETS[name](**options)


__all__ = ["PRESETS", "behavior_cloning", "grpo", "make", "names", "online_dpo", "ppo", "reinforce", "rloo"]
