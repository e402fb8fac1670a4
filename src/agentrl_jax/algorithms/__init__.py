"""Presets by name: ``make("grpo", eps_high=0.28)``; ``names()`` lists them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.grpo import grpo
from agentrl_jax.algorithms.ppo import ppo
from agentrl_jax.algorithms.preference import online_dpo
from agentrl_jax.algorithms.reinforce import reinforce, rloo
from agentrl_jax.algorithms.supervised import behavior_cloning
from agentrl_jax.checks import check_numbers

PRESETS: dict[str, Callable[..., Algorithm]] = {
    f.__name__: f for f in (reinforce, rloo, grpo, ppo, online_dpo, behavior_cloning)
}


def names() -> tuple[str, ...]:
    """The presets that ``make`` knows."""
    return tuple(sorted(PRESETS))


def make(name: str, **options: Any) -> Algorithm:
    """A preset by name, with any of its keywords changed.

    Raises:
      ValueError: an unknown preset or keyword, and the message lists what there is; a value of another type than the
        keyword's, a number out of range, a choice that does not exist.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(names())}")
    known = tuple(inspect.signature(PRESETS[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{name} has no option {unknown}; it has: {', '.join(known)}")
    _check_types(name, options)
    return PRESETS[name](**options)


def _check_types(name: str, options: dict[str, Any]) -> None:
    """A preset branches on its switches: a string such as ``"no"`` would be true."""
    hints = typing.get_type_hints(PRESETS[name])
    for option, value in options.items():
        allowed = typing.get_args(hints[option]) or (hints[option],)
        if value is None and type(None) in allowed:
            continue
        if float in allowed:
            check_numbers({option: value})
        elif type(value) not in allowed:
            raise ValueError(f"{name}: {option} must be of type {allowed[0].__name__}, got {value!r}")


__all__ = ["PRESETS", "behavior_cloning", "grpo", "make", "names", "online_dpo", "ppo", "reinforce", "rloo"]
