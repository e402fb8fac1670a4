"""Policy and value losses: unreduced, shape-free, minimised.

Each returns one value per input element (the sequence losses ``gspo`` and ``gmpo`` one per sequence);
``masked.aggregate`` with a named mode makes the number. ``mask`` is what makes masked inputs safe (they may hold NaN or
infinity); masked outputs are 0. Advantages, old, reference and behaviour log-probabilities never carry gradient.
Log-ratios are clamped to 20 in magnitude before ``exp``: loss and gradient stay finite for any input, and a clipped
token has exactly zero gradient. Inputs must have equal shapes (scalars aside): nothing broadcasts by accident.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above, check_at_least, check_shapes
from agentrl_jax.entropy import clip_cov_keep, entropy, kl_cov_select, top_entropy_mask
from agentrl_jax.imitation import awr, awr_weight, chord_mu, chord_phi, dft, luffy, mix, nll, positive_nll, rl_plus
from agentrl_jax.importance import (
    clamp_log_ratio,
    importance_weight,
    log_ratio,
    normalise_weight,
    offpolicy_keep,
    veto,
)
from agentrl_jax.kl import kl
from agentrl_jax.masked import fill, fixed, masked_mean
from agentrl_jax.types import Array

__all__ = [
    "Clipped",
    "asymmetric_is",
    "awr",
    "awr_weight",
    "chord_mu",
    "chord_phi",
    "cispo",
    "clip_cov_keep",
    "clipped",
    "decoupled_ppo",
    "dft",
    "entropy",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_weight",
    "kl",
    "kl_cov",
    "kl_cov_select",
    "luffy",
    "mix",
    "nll",
    "normalise_weight",
    "offpolicy_keep",
    "policy_gradient",
    "positive_nll",
    "ppo_clip",
    "rl_plus",
    "sapo",
    "top_entropy_mask",
    "value_clip",
    "value_loss",
    "veto",
]


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


class Clipped(NamedTuple):
    """Which tokens a clip cuts off, ``bool`` each: below with A < 0, above with A > 0, by the dual clip."""

    low: Array
    high: Array
    dual: Array


def clipped(
    logp: Array,
    logp_old: Array,
    adv: Array,
    *,
    eps_low: Array | float = 0.2,
    eps_high: Array | float = 0.2,
    dual_clip: Array | float | None = None,
    mask: Array | None = None,
) -> Clipped:
    """The tokens without gradient under ``ppo_clip``, for metrics: their masked means are the clip fractions."""
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    adv = fixed(adv, mask)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logp, logp_old, mask)))
    dual = jnp.zeros_like(ratio, bool) if dual_clip is None else (adv < 0) & (ratio > dual_clip)
    return Clipped((adv < 0) & (ratio < 1.0 - eps_low), (adv > 0) & (ratio > 1.0 + eps_high), dual)


def gspo(
    logp: Array,
    logp_old: Array,
    adv: Array,
    mask: Array,
    *,
    eps_low: Array | float = 3e-4,
    eps_high: Array | float = 4e-4,
) -> Array:
    """GSPO: PPO's clip on the length-normalised sequence ratio, ``s_i = exp(mean_t(logp - logp_old))``.

    ``max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))``, ``[..., T] -> [...]``: one value a sequence, 0 for an empty
    one; take the mean over non-empty sequences (``masked_mean(loss, mask.any(-1))``), or multiply by the row sums of
    "seq-mean-token-mean" weights. ``adv`` is ``[...]``, or ``[..., T]`` and averaged over the tokens.

    Source: Zheng et al., Group Sequence Policy Optimization, 2025, arXiv 2507.18071 (the small widths are the paper's).
    """
    check_shapes(logp, logp_old=logp_old, mask=mask)
    check_at_least(0.0, eps_low=eps_low, eps_high=eps_high)
    adv = _sequence_adv(adv, logp, mask)
    ratio = jnp.exp(_mean_log_ratio(logp, logp_old, mask))
    loss = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high))
    return fill(loss, jnp.any(jnp.asarray(mask).astype(bool), -1))


def gspo_token(
    logp: Array,
    logp_old: Array,
    adv: Array,
    mask: Array,
    *,
    eps_low: Array | float = 3e-4,
    eps_high: Array | float = 4e-4,
) -> Array:
    """GSPO-token: the value of the sequence ratio with each token's own gradient and advantage, ``[..., T]``.

    ``s_it = stop_gradient(s_i) * exp(logp_it - stop_gradient(logp_it))``, then PPO's clip. Under "seq-mean-token-mean"
    and an advantage that is constant along a sequence it equals ``gspo`` in value and gradient.
    Source: as ``gspo``.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    check_at_least(0.0, eps_low=eps_low, eps_high=eps_high)
    adv, logp = fixed(adv, mask), fill(logp, mask)
    sequence = jax.lax.stop_gradient(jnp.exp(_mean_log_ratio(logp, logp_old, mask)))[..., None]
    ratio = sequence * jnp.exp(logp - jax.lax.stop_gradient(logp))
    return fill(jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)), mask)


def gmpo(
    logp: Array,
    logp_old: Array,
    adv: Array,
    mask: Array,
    *,
    eps_low: Array | float = 0.4,
    eps_high: Array | float = 0.4,
) -> Array:
    """GMPO: the geometric mean of ratios clipped token by token in log space, ``[..., T] -> [...]``.

    With ``d = logp - logp_old`` and ``s = sign(A)``: ``d~ = s min(s d, s clip(d, -eps_low, eps_high))`` and the loss is
    ``-A exp(mean_t d~)``, 0 for an empty sequence; reduce as ``gspo``. The widths bound log-ratios: .4 means ratios
    in (.67, 1.49), not in (.6, 1.4). ``adv`` as in ``gspo``.

    Source: Zhao et al., Geometric-Mean Policy Optimization, 2025, arXiv 2507.20673.
    """
    check_shapes(logp, logp_old=logp_old, mask=mask)
    check_at_least(0.0, eps_low=eps_low, eps_high=eps_high)
    adv = _sequence_adv(adv, logp, mask)
    d, sign = log_ratio(logp, logp_old, mask), jnp.sign(adv)[..., None]
    held = sign * jnp.minimum(sign * d, sign * jnp.clip(d, -eps_low, eps_high))
    return -adv * jnp.exp(masked_mean(held, mask, -1))


def cispo(
    logp: Array,
    logp_old: Array,
    adv: Array,
    *,
    eps_low: Array | float = 1.0,
    eps_high: Array | float = 0.28,
    mask: Array | None = None,
) -> Array:
    """CISPO: a clipped importance weight on the policy gradient, so no token's gradient is dropped.

    ``-stop_gradient(clip(r, 1 - eps_low, 1 + eps_high)) * A * logp``, any shape, token-mean in the paper. The default
    has no effective lower bound, as the paper; verl clips below too (``eps_low=.2``); an absolute cap c (TRL,
    ms-swift: 5) is ``eps_high = c - 1``. The paper tunes ``eps_high``; the default here is DAPO's width. The value
    contains ``logp`` and is not comparable with PPO's.

    Source: MiniMax, MiniMax-M1, 2025, arXiv 2506.13585.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    check_at_least(0.0, eps_low=eps_low, eps_high=eps_high)
    ratio = jnp.exp(log_ratio(logp, logp_old, mask))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high))
    return -weight * fixed(adv, mask) * fill(logp, mask)


def sapo(
    logp: Array,
    logp_old: Array,
    adv: Array,
    *,
    tau_pos: Array | float = 1.0,
    tau_neg: Array | float = 1.05,
    mask: Array | None = None,
) -> Array:
    """SAPO: a sigmoid gate in place of the clip, ``-A (4 / tau) sigmoid(tau (r - 1))``, any shape.

    ``tau`` is ``tau_pos`` for A > 0, else ``tau_neg``. The gradient weight is ``4 s (1 - s) r``, 1 at ``r = 1``; the
    value there is ``-2 A / tau``, not ``-A``.

    Source: Gao et al., Soft Adaptive Policy Optimization, 2025, arXiv 2511.20347.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask)
    check_above(0.0, tau_pos=tau_pos, tau_neg=tau_neg)
    adv = fixed(adv, mask)
    tau = jnp.where(adv > 0, tau_pos, tau_neg)
    ratio = jnp.exp(log_ratio(logp, logp_old, mask))
    return -adv * 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))


def asymmetric_is(
    logp: Array,
    logp_old: Array,
    adv: Array,
    *,
    eps_low: Array | float = 0.2,
    eps_high: Array | float = 0.2,
    cap: Array | float = 3.0,
    mask: Array | None = None,
) -> Array:
    """Asymmetric importance sampling: the inverse ratio for positive advantages, any shape.

    The weight w on ``A * grad logp`` is, for A > 0, ``min(1 / r, cap)`` and 0 once ``r > 1 + eps_high``; for A < 0,
    ``min(r, cap)`` and 0 below ``1 - eps_low``. The value is ``-A w``; only its gradient matters.

    Wang et al., ASPO: Asymmetric Importance Sampling Policy Optimization, 2025, arXiv 2510.06062 (Archer 2.0). Not the
    survey's ASPO (``group_shaping.aspo_shaping``). There, the widths depend on a token's entropy (.2 low, .4
    high): pass arrays.
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, mask=mask, eps_low=eps_low, eps_high=eps_high)
    adv, d = fixed(adv, mask), log_ratio(logp, logp_old, mask)
    ratio = jnp.exp(d)
    up = jnp.where(ratio > 1.0 + eps_high, 0.0, jnp.minimum(jnp.exp(-d), cap))
    down = jnp.where(ratio < 1.0 - eps_low, 0.0, jnp.minimum(ratio, cap))
    weight = jax.lax.stop_gradient(jnp.where(adv > 0, up, down))
    logp = fill(logp, mask)
    return -adv * weight * jnp.exp(logp - jax.lax.stop_gradient(logp))


def decoupled_ppo(
    logp: Array,
    logp_old: Array,
    logp_behaviour: Array,
    adv: Array,
    *,
    eps_low: Array | float = 0.2,
    eps_high: Array | float = 0.2,
    dual_clip: Array | float | None = None,
    cap: Array | float = 5.0,
    mask: Array | None = None,
) -> Array:
    """PPO around the proximal policy, re-weighted to the behaviour: ``min(pi_old / pi_beh, cap) * ppo_clip``.

    Any shape. The weight carries no gradient. With ``logp_behaviour == logp_old`` it is ``ppo_clip``.
    ``importance_weight`` makes other weights (masked, sequence-level).

    Sources: Hilton et al., 2021, arXiv 2110.00641; Fu et al., AReaL, 2025, 2505.24298 (cap 5).
    """
    check_shapes(logp, logp_behaviour=logp_behaviour)
    loss = ppo_clip(logp, logp_old, adv, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip, mask=mask)
    weight = jnp.exp(clamp_log_ratio(fixed(logp_old, mask) - fixed(logp_behaviour, mask)))
    return jnp.minimum(weight, cap) * loss


def kl_cov(
    logp: Array,
    logp_old: Array,
    adv: Array,
    selected: Array,
    *,
    coef: Array | float = 1.0,
    mask: Array | None = None,
) -> Array:
    """KL-Cov: ``-A r``, plus ``coef * |logp - logp_old|`` on the tokens ``selected`` by ``kl_cov_select``, any shape.

    There is no clip. Source: Cui et al., The Entropy Mechanism of RL, 2025, arXiv 2505.22617 (coef 1).
    """
    check_shapes(logp, logp_old=logp_old, adv=adv, selected=selected, mask=mask)
    d = fill(logp, mask) - fixed(logp_old, mask)
    # The gradient of `abs` at 0 is 1 in JAX: it would pull the first, on-policy step to one side.
    return -fixed(adv, mask) * jnp.exp(clamp_log_ratio(d)) + coef * fill(jnp.sign(d) * d, selected)


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


def _mean_log_ratio(logp: Array, logp_old: Array, mask: Array) -> Array:
    return clamp_log_ratio(masked_mean(fill(logp, mask) - fixed(logp_old, mask), mask, -1))


def _sequence_adv(adv: Array, logp: Array, mask: Array) -> Array:
    """One advantage a sequence, from ``[...]`` or ``[..., T]``."""
    if jnp.shape(adv) == jnp.shape(logp):
        return jax.lax.stop_gradient(masked_mean(adv, mask, -1))
    if jnp.ndim(adv) and jnp.shape(adv) != jnp.shape(logp)[:-1]:
        raise ValueError(f"adv has shape {jnp.shape(adv)}, expected {jnp.shape(logp)[:-1]} or {jnp.shape(logp)}.")
    return fixed(jnp.broadcast_to(adv, jnp.shape(logp)[:-1]))
