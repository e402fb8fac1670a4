"""Importance ratios and the weights that correct a sampler that is not the trainer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.masked import fill
from agentrl_jax.types import Array

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this magnitude before ``exp``, as in verl: e^20 is 4.9e8, far inside float32."""


def clamp_log_ratio(x: Array) -> Array:
    """``x`` clamped to ``[-20, 20]``; beyond, its gradient is exactly 0."""
    return jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(logp: Array, logp_old: Array, mask: Array | None = None) -> Array:
    """``logp - stop_gradient(logp_old)``, clamped to 20 in magnitude; 0 outside ``mask``. Elementwise."""
    return clamp_log_ratio(fill(logp, mask) - jax.lax.stop_gradient(fill(logp_old, mask)))
