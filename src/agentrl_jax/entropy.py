"""Entropy of the full vocabulary, and token selections by entropy and covariance."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_shapes
from agentrl_jax.masked import as_float, fill, masked_count, masked_mean
from agentrl_jax.types import Array


def entropy(logits: Array) -> Array:
    """``-sum_v p log p``, in nats and float32: ``[..., V] -> [...]``.

    Logits of ``-inf`` (filtered tokens) take no part: gradient exactly 0 there. A row without finite logits gives 0.
    The gradient is ``-p (log p + H)``; the sampled ``-logp`` has the same mean but its gradient has mean 0.
    """
    log_p, p = _log_softmax(logits)
    return -jnp.sum(p * log_p, axis=-1)


def full_kl(logits: Array, logits_ref: Array) -> Array:
    """``sum_v p (log p - log q)`` over the whole vocabulary, float32: ``[..., V] -> [...]``.

    No gradient flows into the reference.     Tokens ruled out in ``logits`` (``-inf``) take no part; a token ruled
    out in the reference alone gives infinity.
    """
    log_p, p = _log_softmax(logits)
    log_q = jax.nn.log_softmax(jax.lax.stop_gradient(as_float(logits_ref)), axis=-1)
    return jnp.sum(p * (log_p - jnp.where(p > 0, log_q, 0.0)), axis=-1)


def _log_softmax(logits: Array) -> tuple[Array, Array]:
    """Log-probabilities, 0 where ruled out, and probabilities, 0 where ruled out."""
    logits = as_float(logits)
    allowed = logits > -jnp.inf
    top = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, logits, -jnp.finfo(logits.dtype).max), -1, keepdims=True))
    shifted = jnp.where(allowed, logits - jnp.where(jnp.isfinite(top), top, 0.0), 0.0)
    total = jnp.sum(jnp.where(allowed, jnp.exp(shifted), 0.0), axis=-1, keepdims=True)
    log_p = jnp.where(allowed, shifted - jnp.log(jnp.maximum(total, jnp.finfo(logits.dtype).tiny)), 0.0)
    return log_p, jnp.where(allowed, jnp.exp(log_p), 0.0)


def top_entropy_mask(entropy: Array, mask: Array, *, fraction: Array | float = 0.2) -> Array:
    """The counted tokens with the highest entropy: ``bool``, any shape.

    Keeps the ``max(1, floor(fraction * n))`` highest of the ``n`` counted tokens, and ties with the last of them.
    Compute it over a whole batch; use it as a loss mask (drop) or a weight (the others stay in the denominator, as
    TRL).
    Source: Wang et al., Beyond the 80/20 Rule, 2025, arXiv 2506.01939 (fraction .2).
    """
    check_shapes(entropy, mask=mask)
    mask = jnp.asarray(mask).astype(bool)
    ordered = jnp.sort(jax.lax.stop_gradient(fill(entropy, mask, -jnp.inf)).ravel())[::-1]
    keep = jnp.maximum(jnp.floor(fraction * masked_count(mask) + 1e-4), 1.0).astype(jnp.int32)
    return mask & (as_float(entropy) >= ordered[jnp.minimum(keep - 1, ordered.shape[0] - 1)])


def covariance(logp: Array, adv: Array, mask: Array) -> Array:
    """``(logp - mean logp) * (A - mean A)`` over the counted tokens, no gradient, 0 elsewhere: any shape."""
    check_shapes(logp, adv=adv, mask=mask)
    logp, adv = jax.lax.stop_gradient((fill(logp, mask), fill(jnp.broadcast_to(adv, jnp.shape(logp)), mask)))
    return fill((logp - masked_mean(logp, mask)) * (adv - masked_mean(adv, mask)), mask)


def kl_cov_select(logp: Array, adv: Array, mask: Array, *, fraction: Array | float = 2e-4) -> Array:
    """The ``max(1, floor(fraction * n))`` tokens of highest covariance, for ``losses.kl_cov``: ``bool``, any shape.

    Source: Cui et al., The Entropy Mechanism of RL, 2025, arXiv 2505.22617; over a whole batch.
    """
    return top_entropy_mask(covariance(logp, adv, mask), mask, fraction=fraction)


def clip_cov_keep(
    logp: Array,
    logp_old: Array,
    adv: Array,
    mask: Array,
    key: Array,
    *,
    fraction: Array | float = 2e-4,
    low: Array | float = 1.0,
    high: Array | float = 5.0,
    eps_low: Array | float = 0.2,
    eps_high: Array | float = 0.2,
) -> Array:
    """Clip-Cov: the tokens whose loss stays, ``bool``, any shape; multiply the loss of the others by 0.

    Of the counted tokens that PPO's clip leaves alone and whose covariance lies in ``(low, high)``,
    ``max(1, floor(fraction * n))`` chosen at random lose their loss. ``key`` is consumed.
    Source: Cui et al., The Entropy Mechanism of RL, 2025, arXiv 2505.22617; constants as in verl.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    mask = jnp.asarray(mask).astype(bool)
    cov = covariance(logp, adv, mask)
    ratio = jnp.exp(jnp.clip(fill(logp, mask) - fill(logp_old, mask), -20.0, 20.0))
    adv = fill(jnp.broadcast_to(adv, mask.shape), mask)
    cut = ((adv > 0) & (ratio > 1.0 + eps_high)) | ((adv < 0) & (ratio < 1.0 - eps_low))
    eligible = mask & ~cut & (cov > low) & (cov < high)
    draw = jnp.where(eligible, jax.random.uniform(key, mask.shape), 2.0)
    count = jnp.maximum(jnp.floor(fraction * masked_count(mask) + 1e-4), 1.0).astype(jnp.int32)
    last = jnp.sort(draw.ravel())[jnp.minimum(count - 1, draw.size - 1)]
    return mask & ~(eligible & (draw <= last))
