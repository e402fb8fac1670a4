"""Estimators of the Kullback-Leibler divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_choice, check_shapes
from agentrl_jax.importance import clamp_log_ratio
from agentrl_jax.masked import fill
from agentrl_jax.types import Array

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl(
    logp: Array,
    logp_ref: Array,
    *,
    estimator: str = "k1",
    mask: Array | None = None,
    logp_old: Array | None = None,
) -> Array:
    """Per-token estimate of ``KL(pi || ref)`` on tokens sampled from ``pi``; with ``d = logp - logp_ref``::

      k1  d                  value unbiased; as a loss its expected gradient is 0; as a reward penalty, exact
      k2  d^2 / 2            value biased; as a loss its expected gradient is that of KL(pi || ref)
      k3  exp(-d) - 1 + d    value unbiased, >= 0; as a loss its expected gradient is that of KL(ref || pi)

    "k1+" and "k3+" have the value of k1 and k3 with the gradient of k2 (straight-through, as in verl).

    With ``logp_old``, the policy the tokens were drawn from, each term is multiplied by ``pi / pi_old`` and stays exact
    off the policy: the weight carries gradient for k1 and k3 (then ``ratio * k3`` has the gradient of
    KL(pi || ref), on the policy too) and is detached for k2 and the "+" forms.

    Args:
      logp: any shape, under gradient.
      logp_ref: the same shape; no gradient flows into it.
      estimator: one of ``ESTIMATORS``.
      mask: the same shape; entries outside give 0 whatever they hold.
      logp_old: the same shape; no gradient flows into it.

    Returns:
      The shape of ``logp``. The exponents of k3 and of the weight are clamped to 20 in magnitude, where their
      gradient is 0: finite for any log-ratio.

    Raises:
      ValueError: unknown ``estimator``.

    Sources: Schulman, Approximating KL Divergence, 2020 (blog); Tang and Munos, 2025, arXiv 2506.09477;
    DeepSeek-V3.2 for the weighted form.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_shapes(logp, logp_ref=logp_ref, mask=mask, logp_old=logp_old)
    d = fill(logp, mask) - jax.lax.stop_gradient(fill(logp_ref, mask))
    term = _term(d, estimator)
    if logp_old is None:
        return term
    ratio = jnp.exp(clamp_log_ratio(fill(logp, mask) - jax.lax.stop_gradient(fill(logp_old, mask))))
    return fill(term * (ratio if estimator in ("k1", "k3") else jax.lax.stop_gradient(ratio)), mask)


def _term(d: Array, estimator: str) -> Array:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    if estimator == "k3":
        safe = clamp_log_ratio(d)
        return jnp.expm1(-safe) + d
    k2 = 0.5 * d**2
    return jax.lax.stop_gradient(_term(d, estimator[:2]) - k2) + k2
