"""Refusals at the border of the loss functions: shapes and ranges, before anything is traced or compiled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from agentrl_jax.types import Array


def check_shapes(like: Array, **others: Array | float | None) -> None:
    """Refuses arrays of another shape than ``like`` (scalars and None pass), naming them."""
    for name, x in others.items():
        if x is not None and jnp.ndim(x) and jnp.shape(x) != jnp.shape(like):
            raise ValueError(f"{name} has shape {jnp.shape(x)}, expected {jnp.shape(like)} or a scalar.")


def check_at_least(low: float, **values: Array | float | None) -> None:
    """Refuses a Python number below ``low``, naming it; traced values pass."""
    for name, x in values.items():
        if isinstance(x, int | float | np.number) and not x >= low:
            raise ValueError(f"{name} must be at least {low}, got {x}.")


def check_above(low: float, **values: Array | float | None) -> None:
    """Refuses a Python number at or below ``low``, naming it; traced values pass."""
    for name, x in values.items():
        if isinstance(x, int | float | np.number) and not x > low:
            raise ValueError(f"{name} must be above {low}, got {x}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a name that is not among ``choices``, listing them."""
    if value not in choices:
        raise ValueError(f"Unknown {name} {value!r}. Known: {', '.join(choices)}.")
