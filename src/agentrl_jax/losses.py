"""Policy and value losses: unreduced, shape-free, minimised.

Each returns one value per input element; ``masked.aggregate`` with a named mode makes the number. ``mask`` is what
makes masked inputs safe (they may hold NaN or infinity); masked outputs are 0. Advantages, old, reference and
behaviour log-probabilities never carry gradient. Log-ratios are clamped to 20 in magnitude before ``exp``: loss and
gradient stay finite for any input, and a clipped token has exactly zero gradient. Inputs must have equal shapes
(scalars aside): nothing broadcasts by accident.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.importance import log_ratio
from agentrl_jax.kl import kl
from agentrl_jax.masked import fill
from agentrl_jax.types import Array

__all__ = ["kl", "policy_gradient", "ppo_clip", "value_clip", "value_loss"]


def policy_gradient(logp: Array, adv: Array, *, mask: Array | None = None) -> Array:
    """REINFORCE: ``-stop_gradient(adv) * logp``, any shape.

    Unbiased for the return of an episode under "seq-mean-token-sum"; other aggregations re-weight sequences by length.

    Source: Williams, Simple Statistical Gradient-Following Algorithms, 1992.
    """
    check_shapes(logp, adv=adv, mask=mask)
    return -fixed(adv, mask) * fill(logp, mask)


def ppo_clip(
    logp: Array,
    logp_old: Array,
    adv: Array,
    *,
    eps_low: Array | float = 0.2,
    eps_high: Array | float = 0.2,
    dual_clip: Array | float | None = None,
    ratio_max: Array | float | None = None,
    mask: Array | None = None,
) -> Array:
    """PPO's clipped surrogate: ``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``, ``r = exp(logp - logp_old)``.

    Args:
      logp: any shape, under gradient. On per-token values this is PPO, GRPO and DAPO (``eps_high=.28``); on masked
        sums over a sequence it is the sequence ratio of RLOO.
      logp_old: log-probability at the start of the update.
      adv: advantage.
      eps_low, eps_high: clip widths below and above 1.
      dual_clip: ``c > 1``; for ``A < 0`` alone the loss is capped at ``c |A|`` (Ye et al., 2019, arXiv 1912.09729;
        3 in verl, absent from the PPO, GRPO and DAPO papers).
      ratio_max: two-sided clip: the unclipped ratio is capped at this value (INTELLECT-2, 2025, 2505.07291: 4). For
        ``A < 0`` it is ``dual_clip`` with the same number.
      mask: what counts.

    Returns:
      The shape of ``logp``. At ``r = 1`` the gradient is ``-A``; on a clipped token it is exactly 0.

    Raises:
      ValueError: shapes differ; ``dual_clip <= 1``; a negative clip width.

    Source: Schulman et al., 2017, arXiv 1707.06347; asymmetric widths: DAPO, Yu et al., 2025, 2503.14476.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    check_at_least(0.0, eps_low=eps_low, eps_high=eps_high)
    check_above(1.0, dual_clip=dual_clip)
    adv = fixed(adv, mask)
    ratio = jnp.exp(log_ratio(logp, logp_old, mask))
    free = ratio if ratio_max is None else jnp.minimum(ratio, ratio_max)
    loss = jnp.maximum(-adv * free, -adv * jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high))
    if dual_clip is None:
        return loss
    return jnp.where(adv < 0, jnp.minimum(loss, -adv * dual_clip), loss)


def value_loss(value: Array, target: Array, *, mask: Array | None = None) -> Array:
    """``(value - stop_gradient(target))^2 / 2``, any shape."""
    check_shapes(value, target=target, mask=mask)
    return 0.5 * (fill(value, mask) - fixed(target, mask)) ** 2


def value_clip(
    value: Array, value_old: Array, target: Array, *, eps: Array | float, mask: Array | None = None
) -> Array:
    """PPO's clipped value loss: ``max((V - G)^2, (V_old + clip(V - V_old, -eps, eps) - G)^2) / 2``.

    The larger of the two squared errors (not the smaller, and not the square of the larger error). ``value_old`` and
    ``target`` carry no gradient. Any shape. ``eps`` is .2 in most libraries, .5 in verl.

    Source: OpenAI baselines ppo2; Schulman et al., 2017, arXiv 1707.06347 describes only the policy's clip.
    """
    check_shapes(value, value_old=value_old, target=target, mask=mask)
    check_at_least(0.0, eps=eps)
    value, old, target = fill(value, mask), fixed(value_old, mask), fixed(target, mask)
    clipped = old + jnp.clip(value - old, -eps, eps)
    return 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2)


def fixed(x: Array | float, mask: Array | None = None) -> Array:
    """``x`` without gradient, 0 outside ``mask``."""
    return jax.lax.stop_gradient(fill(x, mask if jnp.ndim(x) else None))


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
