"""Refusals at the border of the loss functions: shapes and ranges, before anything is traced or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from agentrl_jax.types import Array

UNIT = (
    "discount", "lambda_", "lambda_critic", "label_smoothing", "mu", "mu_peak", "mu_valley", "token_lambda",
    "turn_discount", "step_discount", "uncertain_fraction", "uncertain_mass", "entropy_fraction", "cov_fraction",
    "perception_mask", "replay_share", "kept_pairs",
)  # fmt: skip
NOT_NEGATIVE = (
    "learning_rate", "weight_decay", "warmup", "decay", "temperature", "eps_low", "eps_high", "kl_coef", "value_coef",
    "value_eps", "veto_floor", "offpolicy_delta", "centre_coef",
)  # fmt: skip
POSITIVE = (
    "max_grad_norm", "beta", "awr_beta", "weight_max", "tau_pos", "tau_neg", "entropy_kappa", "overlong_buffer",
    "kl_target", "kl_horizon", "length_alpha", "luffy_gamma", "dual_clip", "ratio_max",
)  # fmt: skip
BELOW_HALF = ("label_noise",)


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


def known(x: Any) -> bool:
    """Whether ``x`` is a scalar whose value can be looked at: no traced one, and no array of several."""
    return not isinstance(x, Tracer) and np.ndim(x) == 0


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Refuses numbers of a run that are out of the range of their name; a traced one cannot be looked at.

    Python, NumPy and JAX numbers alike, and arrays of them (a sweep). A boolean is no number.

    Raises:
      ValueError: no number, not finite, or out of range, naming it.
    """
    for name, value in numbers.items():
        if isinstance(value, Tracer):
            continue
        x = np.asarray(value)
        if not jnp.issubdtype(x.dtype, np.number):
            raise ValueError(f"{name} must be a number, got {value!r}")
        x = x.astype(np.float64)
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite, got {value}")
        if name in UNIT and not ((x >= 0) & (x <= 1)).all():
            raise ValueError(f"{name} must be in [0, 1], got {value}")
        if name in NOT_NEGATIVE and not (x >= 0).all():
            raise ValueError(f"{name} must not be negative, got {value}")
        if name in POSITIVE and not (x > 0).all():
            raise ValueError(f"{name} must be positive, got {value}")
        if name in BELOW_HALF and not ((x >= 0) & (x < 0.5)).all():
            raise ValueError(f"{name} must be in [0, 0.5), got {value}")
