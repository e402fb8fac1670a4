"""Losses on text written by someone else, or chosen after the fact: unreduced, any shape, minimised.

``mask`` makes masked inputs safe; masked outputs are 0. Weights never carry gradient. To average over a subset
alone (correct episodes, expert tokens), take the aggregation weights of that subset's mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above, check_shapes
from agentrl_jax.masked import fill, fixed
from agentrl_jax.types import Array


def nll(logp: Array, *, mask: Array | None = None) -> Array:
    """``-logp``: supervised training, RAFT and expert iteration on the episodes that were kept.

    Source of RAFT: Dong et al., 2023, arXiv 2304.06767.
    """
    check_shapes(logp, mask=mask)
    return -fill(logp, mask)


def positive_nll(logp: Array, correct: Array, *, mask: Array | None = None) -> Array:
    """VAPO's imitation term: ``-logp`` on tokens of correct episodes, 0 elsewhere.

    ``correct`` ``bool`` has the shape of ``logp``. The paper divides by the tokens of correct episodes:
    ``aggregate(loss, mask & correct, "token-mean")``, coefficient .1.
    Source: Yue et al., VAPO, 2025, arXiv 2504.05118, from a secondary source.
    """
    check_shapes(logp, correct=correct, mask=mask)
    return fill(-fill(logp, mask), correct)


def dft(logp: Array, *, mask: Array | None = None) -> Array:
    """Dynamic fine-tuning: ``-stop_gradient(p) * logp``, ``p = exp(logp)``.

    Source: Wu et al., On the Generalization of SFT, 2025, arXiv 2508.05629; also CHORD's importance-weighted SFT.
    """
    check_shapes(logp, mask=mask)
    logp = fill(logp, mask)
    return -jax.lax.stop_gradient(_probability(logp)) * logp


def chord_phi(logp: Array, *, mask: Array | None = None) -> Array:
    """CHORD's token-weighted imitation: ``-stop_gradient(p (1 - p)) * logp``, ``p = exp(logp)``.

    Source: Zhang et al., On-Policy RL Meets Off-Policy Experts, 2025, arXiv 2508.11408.
    """
    check_shapes(logp, mask=mask)
    logp = fill(logp, mask)
    p = jax.lax.stop_gradient(_probability(logp))
    return -p * (1.0 - p) * logp


def chord_mu(
    step: Array,
    *,
    peak: Array | float = 0.9,
    valley: Array | float = 0.05,
    warmup: Array | float = 0.0,
    decay: Array | float = 200.0,
) -> Array:
    """CHORD's share of imitation at ``step``: linear warm-up to ``peak``, then a cosine to ``valley``. Scalar.

    The defaults are ms-swift's example script; with token weights (``chord_phi``) the share is constant, .1.
    """
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.clip((step + 1.0) / jnp.maximum(warmup, 1.0), 0.0, 1.0)
    fall = jnp.clip((step - warmup) / jnp.maximum(decay, 1.0), 0.0, 1.0)
    cosine = valley + (peak - valley) * 0.5 * (1.0 + jnp.cos(jnp.pi * fall))
    return jnp.where(step < warmup, peak * rise, cosine)


def mix(loss_rl: Array, loss_sft: Array, mu: Array | float) -> Array:
    """``(1 - mu) * loss_rl + mu * loss_sft``: CHORD's total, for values or aggregated numbers."""
    return (1.0 - mu) * loss_rl + mu * loss_sft


def luffy(logp: Array, adv: Array, *, gamma: Array | float = 0.1, mask: Array | None = None) -> Array:
    """LUFFY's shaped loss on expert tokens: ``-A f(p)``, ``f(p) = p / (p + gamma)``, ``p = exp(logp)``; no clip.

    The gradient weight on ``A * grad logp`` is ``gamma p / (p + gamma)^2``: largest where the policy is unsure. The
    expert's own probability is taken as 1. The advantage is normalised over own and expert episodes together.

    Source: Yan et al., LUFFY, 2025, arXiv 2504.14945.
    """
    check_shapes(logp, adv=adv, mask=mask)
    check_above(0.0, gamma=gamma)
    p = _probability(fill(logp, mask))
    return fill(-fixed(adv, mask) * p / (p + gamma), mask)


def rl_plus(
    logp: Array, logp_old: Array, adv: Array, *, power: Array | float = 0.5, mask: Array | None = None
) -> Array:
    """RL-PLUS on expert tokens: multiple importance sampling and an exploration-weighted advantage.

    ``-A stop_gradient((1 - p)^power) * 2 p / (p_old + omega)``, ``omega = (1 + p_old) / 2``: the unknown expert
    probability is taken halfway between the old policy's and 1. The repository's recipe takes ``A = R - mean``
    over own and expert episodes together, without a deviation, and no clip on own tokens.

    Source: Dong et al., RL-PLUS, 2025, arXiv 2508.00222; formula and power .5 from the official repository.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    p, old = _probability(fill(logp, mask)), _probability(fixed(logp_old, mask))
    explore = jax.lax.stop_gradient((1.0 - p) ** power)
    return fill(-fixed(adv, mask) * explore * 2.0 * p / (old + 0.5 * (1.0 + old)), mask)


def awr_weight(adv: Array, *, beta: Array | float, weight_max: Array | float = 20.0) -> Array:
    """``min(exp(A / beta), weight_max)``, no gradient, any shape. Divide by a batch's sum to self-normalise it."""
    check_above(0.0, beta=beta, weight_max=weight_max)
    bound = jnp.log(jnp.asarray(weight_max, jnp.float32))
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(fill(adv, None) / beta, bound)))


def awr(
    logp: Array, adv: Array, *, beta: Array | float, weight_max: Array | float = 20.0, mask: Array | None = None
) -> Array:
    """Advantage-weighted regression: ``-min(exp(A / beta), weight_max) * logp``.

    Source: Peng et al., 2019, arXiv 1910.00177; beta (.05 to 1) and the cap 20 are unconfirmed.
    """
    check_shapes(logp, adv=adv, mask=mask)
    return -awr_weight(fixed(adv, mask), beta=beta, weight_max=weight_max) * fill(logp, mask)


def _probability(logp: Array) -> Array:
    """``exp(min(logp, 0))``: a log-probability is never above 0 but for rounding."""
    return jnp.exp(jnp.minimum(logp, 0.0))
