"""Algorithms by name and by ingredients.

``make("grpo", eps_high=0.28)`` is a preset with some of its keywords changed; ``names()`` lists the presets,
``describe(name)`` says what one is made of. ``compose``, ``prefer`` and ``unpaired`` build any other.
"""

from __future__ import annotations

from agentrl_jax.algorithms.compose import compose
from agentrl_jax.algorithms.describe import catalogue, describe
from agentrl_jax.algorithms.ingredients import choices
from agentrl_jax.algorithms.preferences import prefer, unpaired
from agentrl_jax.algorithms.presets import PRESETS, Preset, make, preset
from agentrl_jax.algorithms.supervised import behavior_cloning


def names() -> tuple[str, ...]:
    """The presets that ``make`` knows."""
    return tuple(sorted(PRESETS))


def numbers(name: str) -> frozenset[str]:
    """Options of a preset that are numbers: traced, and swept by name.

    Some leave no trace in ``Algorithm.hyper`` while they are 0 (``kl_coef``).
    """
    found = preset(name)
    return frozenset(make(name).hyper) | ({"kl_coef"} if found.build is compose else frozenset())


__all__ = [
    "PRESETS", "Preset", "behavior_cloning", "catalogue", "choices", "compose", "describe", "make", "names", "numbers",
    "prefer", "preset", "unpaired",
]  # fmt: skip
