"""Importance ratios, and the weights that correct a sampler that is not the trainer.

The sampler's probabilities (``logp_behaviour``) differ from the trainer's at the start of the update (``logp_old``)
by staleness or by numerics. A weight multiplies the loss of its token and stays out of the denominators
(rejected tokens count, as in TRL, AReaL and slime). No gradient flows through weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_choice, check_shapes
from agentrl_jax.masked import fill, masked_mean, masked_sum
from agentrl_jax.types import Array

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this magnitude before ``exp``, as in verl: e^20 is 4.9e8, far inside float32."""

LEVELS = ("token", "sequence", "geometric")
RULES = ("none", "truncate", "mask")


def clamp_log_ratio(x: Array) -> Array:
    """``x`` clamped to ``[-20, 20]``; beyond, its gradient is exactly 0."""
    return jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(logp: Array, logp_old: Array, mask: Array | None = None) -> Array:
    """``logp - stop_gradient(logp_old)``, clamped to 20 in magnitude; 0 outside ``mask``. Elementwise."""
    return clamp_log_ratio(fill(logp, mask) - jax.lax.stop_gradient(fill(logp_old, mask)))


def importance_weight(
    logp_old: Array,
    logp_behaviour: Array,
    mask: Array,
    *,
    level: str = "token",
    rule: str = "truncate",
    low: Array | float = 0.0,
    high: Array | float = 2.0,
    known: Array | None = None,
) -> Array:
    """Weights for ``logp_old`` against ``logp_behaviour``, one a token: ``[..., T]``.

    With ``d_t = logp_old_t - logp_behaviour_t`` over written tokens, ``level`` says which ratio a token gets: "token"
    ``exp(d_t)``, "sequence" ``exp(sum_t d_t)``, "geometric" ``exp(mean_t d_t)``; ``rule`` what is done to it:
    "truncate" clips to ``[low, high]`` (TIS), "mask" gives 0 outside (MIS, IcePop, geometric rejection), "none" keeps
    it.

    Args:
      logp_old, logp_behaviour: ``[..., T]``.
      mask: ``bool[..., T]``, what enters the loss.
      level, rule: static names.
      low, high: bounds. Truncation: high 2 (verl), 3 for masked sequences (TRL); IcePop: .5 and 5 (unconfirmed);
        geometric rejection: .999 and 1.001.
      known: ``bool[..., T]``, tokens whose behaviour probability is known; the others (expert, logged) get weight 1 and
        enter no product.

    Returns:
      ``[..., T]``, no gradient, 0 outside ``mask``; exactly 1 where both log-probabilities are equal. Log-ratios
      (and their sum) are clamped to 20 in magnitude.

    Raises:
      ValueError: unknown ``level`` or ``rule``; shapes differ.

    Sources: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025 (blog); Liu, Li
    et al., When Speed Kills Stability, 2025 (blog); IcePop: Ring team, 2025, arXiv 2510.18855.
    """
    check_choice("level", level, LEVELS)
    check_choice("rule", rule, RULES)
    check_shapes(logp_old, logp_behaviour=logp_behaviour, mask=mask, known=known)
    mask = jnp.asarray(mask).astype(bool)
    trusted = mask if known is None else mask & jnp.asarray(known).astype(bool)
    d = fill(logp_old, trusted) - fill(logp_behaviour, trusted)
    if level == "sequence":
        d = jnp.broadcast_to(masked_sum(d, trusted, -1, keepdims=True), d.shape)
    if level == "geometric":
        d = jnp.broadcast_to(masked_mean(d, trusted, -1, keepdims=True), d.shape)
    weight = jnp.exp(clamp_log_ratio(d))
    if rule == "truncate":
        weight = jnp.clip(weight, low, high)
    if rule == "mask":
        weight = jnp.where((weight >= low) & (weight <= high), weight, 0.0)
    return jax.lax.stop_gradient(fill(jnp.where(trusted, weight, 1.0), mask))


def veto(logp_old: Array, logp_behaviour: Array, mask: Array, *, floor: Array | float = 1e-4) -> Array:
    """Which sequences have no token with ``exp(logp_old - logp_behaviour) < floor``: ``[..., T] -> bool[...]``."""
    d = fill(logp_old, mask) - fill(logp_behaviour, mask)
    return ~jnp.any(jnp.exp(clamp_log_ratio(d)) < floor, axis=-1)


def normalise_weight(weight: Array, mask: Array) -> Array:
    """Weights divided by their mean over ``mask``, any shape; all zero stays zero. Take the mean over a whole batch."""
    weight = jax.lax.stop_gradient(fill(weight, mask))
    mean = masked_mean(weight, mask)
    return jnp.where(mean > 0, weight / jnp.where(mean > 0, mean, 1.0), 0.0)


def offpolicy_keep(logp: Array, logp_old: Array, adv: Array, mask: Array, *, delta: Array | float) -> Array:
    """Off-policy sequence masking: which sequences stay, ``[..., T] -> bool[...]``.

    A sequence goes when its (mean) advantage is negative and ``mean_t(logp_old - logp) > delta``: it has drifted away
    from what was sampled and would only be pushed further. Source: DeepSeek-V3.2, as in TRL and slime.
    """
    drift = masked_mean(fill(logp_old, mask) - fill(logp, mask), mask, -1)
    return jax.lax.stop_gradient(~((masked_mean(adv, mask, -1) < 0) & (drift > delta)))
