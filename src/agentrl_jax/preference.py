"""Losses on preferences between responses, of log-probabilities of whole sequences.

Inputs are ``[P]``, one number a pair (``w`` the chosen, ``l`` the rejected response): sums over the tokens the agent
wrote, or means where a function says so (``sequence_logp`` makes both; prompt and observation tokens stay out).
Results are unreduced ``[P]``; the reference never carries gradient. Everything goes through ``log_sigmoid`` or
``softplus``, so losses and gradients are finite at any margin.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above, check_numbers
from agentrl_jax.masked import as_float, fill, masked_mean, masked_sum
from agentrl_jax.types import Array


def sequence_logp(logp: Array, mask: Array, *, average: bool = False) -> Array:
    """Log-probability of what the agent wrote: ``[..., T] -> [...]``, summed, or averaged over its tokens.

    A sequence without written tokens gives 0.
    """
    return masked_mean(logp, mask, -1) if average else masked_sum(logp, mask, -1)


def margin(logp_w: Array, logp_l: Array, ref_w: Array, ref_l: Array) -> Array:
    """``h = (logp_w - ref_w) - (logp_l - ref_l)``, ``[P]``; no gradient flows into the reference."""
    ref_w, ref_l = jax.lax.stop_gradient((as_float(ref_w), as_float(ref_l)))
    return (as_float(logp_w) - ref_w) - (as_float(logp_l) - ref_l)


def dpo(
    logp_w: Array,
    logp_l: Array,
    ref_w: Array,
    ref_l: Array,
    *,
    beta: Array | float = 0.1,
    label_smoothing: Array | float = 0.0,
) -> Array:
    """``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, ``h`` the margin, ``e`` the label smoothing.

    ``[P]`` sums (means with a larger ``beta`` are the length-normalised form). ``e > 0`` is conservative DPO (Mitchell,
    2023). ``h = 0`` gives log 2. Over several turns the environment's own probabilities cancel in ``h`` when
    observation tokens are masked; the partition functions of later states do not: see ``dmpo``.

    Source: Rafailov et al., Direct Preference Optimization, 2023, arXiv 2305.18290.
    """
    z = beta * margin(logp_w, logp_l, ref_w, ref_l)
    return -(1.0 - label_smoothing) * jax.nn.log_sigmoid(z) - label_smoothing * jax.nn.log_sigmoid(-z)


def robust_dpo(
    logp_w: Array,
    logp_l: Array,
    ref_w: Array,
    ref_l: Array,
    *,
    beta: Array | float = 0.1,
    label_noise: Array | float = 0.1,
) -> Array:
    """``[-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2 e)``, ``[P]``.

    Unbiased when a share e of the labels is flipped; can be negative; ``e = 0`` is ``dpo``.

    Raises:
      ValueError: ``label_noise`` outside ``[0, 1/2)``; a traced one cannot be looked at.

    Source: Chowdhury et al., Provably Robust DPO, 2024, arXiv 2403.00409.
    """
    check_numbers({"label_noise": label_noise})
    z = beta * margin(logp_w, logp_l, ref_w, ref_l)
    right, flipped = -jax.nn.log_sigmoid(z), -jax.nn.log_sigmoid(-z)
    return ((1.0 - label_noise) * right - label_noise * flipped) / (1.0 - 2.0 * label_noise)


def hinge(logp_w: Array, logp_l: Array, ref_w: Array, ref_l: Array, *, beta: Array | float = 0.1) -> Array:
    """``max(0, 1 - beta h)``, ``[P]``: the SLiC form. Source: Zhao et al., SLiC-HF, 2023, arXiv 2305.10425."""
    return jax.nn.relu(1.0 - beta * margin(logp_w, logp_l, ref_w, ref_l))


def ipo(logp_w: Array, logp_l: Array, ref_w: Array, ref_l: Array, *, beta: Array | float = 0.1) -> Array:
    """``(h - 1 / (2 beta))^2``, ``[P]``; smallest at ``h = 1 / (2 beta)``.

    On sums it is the paper's formula (and OpenRLHF's); on means (``sequence_logp(average=True)``) TRL's, which the
    authors confirmed for language models. ``beta`` is the paper's tau.
    Source: Azar et al., A General Theoretical Paradigm, 2023, arXiv 2310.12036.
    """
    check_above(0.0, beta=beta)
    return (margin(logp_w, logp_l, ref_w, ref_l) - 0.5 / beta) ** 2


def dynamic_beta(
    gap: Array,
    mean: Array,
    *,
    beta: Array | float = 0.1,
    alpha: Array | float = 0.6,
    floor: Array | float = 1e-3,
    where: Array | None = None,
) -> Array:
    """beta-DPO: ``max(beta (1 + alpha (mean_i gap_i - mean)), floor)``, one number for the whole batch, no gradient.

    ``gap`` ``[P]`` is ``margin`` (the code; the paper multiplies it by ``beta``) over the global batch, ``mean`` the
    running mean (``gap_moments``). Give the result to ``dpo``. Source: Wu et al., beta-DPO, 2024, arXiv 2407.08639.
    """
    where = jnp.ones(jnp.shape(gap), bool) if where is None else where
    return jax.lax.stop_gradient(jnp.maximum(beta * (1.0 + alpha * (masked_mean(gap, where) - mean)), floor))


def gap_moments(
    mean: Array, std: Array, gap: Array, *, momentum: Array | float = 0.9, where: Array | None = None
) -> tuple[Array, Array]:
    """beta-DPO's running mean and deviation (ddof 1) of the gap: ``m <- momentum m + (1 - momentum) batch``.

    A batch without pairs leaves both as they are.
    """
    where = jnp.ones(jnp.shape(gap), bool) if where is None else where
    count = jnp.sum(where, dtype=jnp.float32)
    batch = masked_mean(gap, where)
    spread = jnp.sqrt(masked_sum((fill(gap, where) - batch) ** 2, where) / jnp.maximum(count - 1.0, 1.0))
    keep = jnp.where(count > 0, momentum, 1.0)
    return jax.lax.stop_gradient((keep * mean + (1.0 - keep) * batch, keep * std + (1.0 - keep) * spread))


def gap_probability(gap: Array, mean: Array, std: Array, *, where: Array | None = None) -> Array:
    """beta-DPO's chances for keeping pairs: proportional to ``exp(-((gap - mean) / std)^2 / 2)``, ``[P]``.

    They sum to 1. 80 % of a batch are drawn without replacement. Source: as ``dynamic_beta``.
    """
    where = jnp.ones(jnp.shape(gap), bool) if where is None else where.astype(bool)
    z = (fill(gap, where) - mean) / jnp.maximum(std, 1e-6)
    return jax.lax.stop_gradient(jax.nn.softmax(jnp.where(where, -0.5 * z**2, -jnp.inf)))


def mismatched(count: int) -> list[int]:
    """KTO's mismatched pairs: prompt i with response ``mismatched(count)[i]``, a rotation, so never with its own.

    Raises:
      ValueError: fewer than two responses.
    """
    if count < 2:
        raise ValueError(f"Mismatched pairs need at least 2 responses, got {count}.")
    return [(i + 1) % count for i in range(count)]


def kto_reference(logp: Array, ref: Array, *, where: Array | None = None) -> Array:
    """KTO's reference point: ``max(0, mean(logp - ref))`` over mismatched pairs of the whole batch, scalar.

    No gradient. Without a pair it is 0 (TRL's ``apo_zero_unpaired`` takes 0 always).
    """
    where = jnp.ones(jnp.shape(logp), bool) if where is None else where
    gap = fill(logp, where) - fill(ref, where)
    return jax.lax.stop_gradient(jnp.maximum(masked_mean(gap, where), 0.0))


def kto(
    logp: Array,
    ref: Array,
    desirable: Array,
    reference: Array,
    *,
    beta: Array | float = 0.1,
    weight_desirable: Array | float = 1.0,
    weight_undesirable: Array | float = 1.0,
) -> Array:
    """KTO, unpaired: ``w_D (1 - sigmoid(beta (u - z)))`` or ``w_U (1 - sigmoid(beta (z - u)))``, ``u = logp - ref``.

    ``logp``, ``ref`` ``[N]`` sums, ``desirable`` ``bool[N]``, ``reference`` z from ``kto_reference`` -> ``[N]``.
    Choose the weights so that ``w_D n_D / (w_U n_U)`` lies in [1, 4/3].

    Source: Ethayarajh et al., KTO, 2024, arXiv 2402.01306 (Kahneman-Tversky; the survey's expansion of the name is
    wrong).
    """
    u = as_float(logp) - jax.lax.stop_gradient(as_float(ref))
    z = jax.lax.stop_gradient(as_float(reference))
    sign = jnp.where(desirable, 1.0, -1.0)
    weight = jnp.where(desirable, weight_desirable, weight_undesirable)
    return weight * jax.nn.sigmoid(-beta * sign * (u - z))


def log_odds(mean_logp: Array) -> Array:
    """``log(p / (1 - p))`` for ``p = exp(mean_logp)``, elementwise; ``mean_logp`` is held at or below -1e-6."""
    x = jnp.minimum(as_float(mean_logp), -1e-6)
    return x - log1mexp(x)


def log1mexp(x: Array) -> Array:
    """``log(1 - exp(x))`` for ``x < 0``, elementwise, accurate at both ends."""
    near = x > -0.6931472
    return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


def orpo(mean_w: Array, mean_l: Array, *, coef: Array | float = 0.1, nll: Array | None = None) -> Array:
    """``nll - coef * log sigmoid(log_odds(w) - log_odds(l))``, reference-free, on means ``[P]``.

    ``nll`` ``[P]`` is the supervised term, ``-mean_w`` by default: the response alone (TRL counts the prompt too).
    Source: Hong, Lee and Thorne, ORPO, 2024, arXiv 2403.07691 (odds ratio; the survey's expansion of the name is
    wrong).
    """
    nll = -as_float(mean_w) if nll is None else as_float(nll)
    return nll + coef * lcpo(mean_w, mean_l)


def lcpo(mean_w: Array, mean_l: Array) -> Array:
    """LCPO, Length Controlled Preference Optimization: ``-log sigmoid(log_odds(w) - log_odds(l))``, on means ``[P]``.

    ORPO's odds term alone; length control comes from the pairs (the shortest correct response chosen, the longest
    rejected). Not L1's LCPO. Source: Hong et al., 2025, arXiv 2508.10164, from a secondary source that dropped the
    minus sign.
    """
    return -jax.nn.log_sigmoid(log_odds(mean_w) - log_odds(mean_l))


def simpo(mean_w: Array, mean_l: Array, *, beta: Array | float = 2.0, gamma: Array | float = 0.5) -> Array:
    """``-log sigmoid(beta (mean_w - mean_l) - gamma)``, reference-free, on means ``[P]``.

    The official code writes ``gamma / beta`` (.25 by default). Source: Meng, Xia and Chen, SimPO, 2024, arXiv
    2405.14734.
    """
    return -jax.nn.log_sigmoid(beta * (as_float(mean_w) - as_float(mean_l)) - gamma)


def cpo(logp_w: Array, logp_l: Array, nll: Array, *, beta: Array | float = 0.1, coef: Array | float = 1.0) -> Array:
    """``-log sigmoid(beta (logp_w - logp_l)) + coef * nll``, reference-free, on sums ``[P]``.

    ``nll`` ``[P]`` is the chosen response's mean negative log-probability. Source: Xu et al., CPO, 2024, arXiv
    2401.08417.
    """
    return -jax.nn.log_sigmoid(beta * (as_float(logp_w) - as_float(logp_l))) + coef * as_float(nll)


def segment_mask(mask: Array, turn: Array, first: Array, last: Array) -> Array:
    """The written tokens of turns ``first`` to ``last``: ``bool[..., T]``, bounds ``int32[...]``.

    ``dpo`` on sums over it is Step-DPO (one step, after shared correct ones; Lai et al., 2024, arXiv 2406.18629, beta
    .4 to .5) and segment-level DPO (SDPO: both segments start at the erroneous turn, have equally many turns and a
    shared history, so that the partition functions cancel; Kong et al., 2025, arXiv 2501.01821).
    """
    first, last = jnp.asarray(first)[..., None], jnp.asarray(last)[..., None]
    return jnp.asarray(mask).astype(bool) & (turn >= first) & (turn <= last)


def turn_log_ratio(logp: Array, ref: Array, mask: Array, turn: Array, num_turns: int) -> Array:
    """``sum over the written tokens of turn k of (logp - ref)``: ``[T] -> [num_turns]``; no gradient into ``ref``."""
    inside = jnp.asarray(mask).astype(bool) & (turn >= 0) & (turn < num_turns)
    gap = fill(logp, inside) - jax.lax.stop_gradient(fill(ref, inside))
    return jax.ops.segment_sum(gap, jnp.where(inside, turn, 0), num_turns)


def dmpo_weights(turns: Array, num_turns: int, *, discount: Array | float = 0.7) -> Array:
    """``phi(t, T) = discount^t (1 - discount^(T - t)) / (1 - discount^T)``, 0 for t >= T.

    ``int[...] -> [..., num_turns]``.     ``discount = 1`` is the limit ``(T - t) / T``; ``phi(0, T) = 1``.
    """
    t = jnp.arange(num_turns, dtype=jnp.float32)
    total = jnp.maximum(as_float(turns)[..., None], 1.0)
    left = jnp.maximum(total - t, 0.0)
    discount = jnp.asarray(discount, jnp.float32)
    limit = jnp.abs(1.0 - discount) < 1e-6
    log_discount = jnp.log(jnp.where(limit, 0.5, jnp.maximum(discount, 1e-30)))
    geometric = jnp.power(discount, t) * jnp.expm1(left * log_discount) / jnp.expm1(total * log_discount)
    return jnp.where(t < as_float(turns)[..., None], jnp.where(limit, left / total, geometric), 0.0)


def dmpo(
    ratio_w: Array,
    ratio_l: Array,
    turns_w: Array,
    turns_l: Array,
    *,
    beta: Array | float = 0.1,
    discount: Array | float = 0.7,
) -> Array:
    """Multi-turn DPO: ``-log sigmoid(beta (sum_t phi(t, T_w) ratio_w_t - sum_t phi(t, T_l) ratio_l_t))``.

    ``ratio`` ``[P, K]`` from ``turn_log_ratio`` (observation tokens stay out), ``turns`` ``int[P]`` the numbers of
    turns -> ``[P]``. Pairs of one turn give ``dpo``.

    What cancels between the two trajectories of a pair: the first state's partition function, and the environment's
    transition probabilities, which policy and reference share. What does not cancel in a plain sum over turns: the
    partition functions of later states, which differ as the trajectories part. Here length-normalised discounted
    occupancies make them a constant of the pair.

    Source: Shi et al., Direct Multi-Turn Preference Optimization, 2024, arXiv 2406.14868 (discount .7 in its code).
    """
    phi_w = dmpo_weights(turns_w, ratio_w.shape[-1], discount=discount)
    phi_l = dmpo_weights(turns_l, ratio_l.shape[-1], discount=discount)
    z = jnp.sum(phi_w * fill(ratio_w, phi_w > 0), -1) - jnp.sum(phi_l * fill(ratio_l, phi_l > 0), -1)
    return -jax.nn.log_sigmoid(beta * z)


def bradley_terry(
    reward_w: Array, reward_l: Array, *, label_margin: Array | float = 0.0, centre_coef: Array | float = 0.0
) -> Array:
    """Reward-model loss: ``-log sigmoid(r_w - r_l - label_margin) + centre_coef (r_w + r_l)^2``, ``[P]``.

    Sources: Bradley and Terry, 1952; margin: Llama 2, 2023, arXiv 2307.09288; centring: TRL (.01, off by default).
    """
    reward_w, reward_l = as_float(reward_w), as_float(reward_l)
    return -jax.nn.log_sigmoid(reward_w - reward_l - label_margin) + centre_coef * (reward_w + reward_l) ** 2


def implicit_reward(logp: Array, ref: Array, *, beta: Array | float = 0.1) -> Array:
    """``beta (logp - ref)``, no gradient, any shape: for metrics and for ranking."""
    return jax.lax.stop_gradient(beta * (as_float(logp) - as_float(ref)))
