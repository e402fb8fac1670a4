"""Advantages relative to a group: one number an episode, ``[N]`` with group ids.

``group`` holds ids in ``[0, num_groups)``, of any sizes, in any order; members outside that range, and members with
``where`` False, do not count and get 0. A statistic counts episodes, never the rows an episode was split into. A group
whose returns are all equal, whatever their dtype and number, gets exactly 0: the group's smallest return is
subtracted first, so there is no rounding residue for a tiny deviation to blow up. No gradient flows through.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above, check_at_least, check_choice
from agentrl_jax.masked import as_float, fill, masked_var
from agentrl_jax.types import Array

SCALES = ("std", "none", "batch", "batch-centred")


class Members(NamedTuple):
    """Who counts, and in which group: ``where`` ``bool[N]``, ``group`` ``int32[N]`` in range, ``size`` ``[N]``."""

    where: Array
    group: Array
    size: Array


def members(group: Array, num_groups: int, where: Array | None = None) -> Members:
    """Validated membership: ids out of range do not count; ``size`` counts each member's group, ``float32[N]``."""
    group = jnp.asarray(group)
    counts = (group >= 0) & (group < num_groups)
    if where is not None:
        counts = counts & jnp.asarray(where).astype(bool)
    table = jax.ops.segment_sum(counts.astype(jnp.float32), jnp.where(counts, group, 0), num_groups)
    group = jnp.where((group >= 0) & (group < num_groups), group, 0)
    return Members(counts, group, table[group])


def group_sum(x: Array, who: Members, num_groups: int, *, to: Members | None = None) -> Array:
    """Sum over each member's group, given back to the members (to those of ``to``): ``[N] -> [N]``, 0 elsewhere."""
    to = who if to is None else to
    return fill(jax.ops.segment_sum(fill(x, who.where), who.group, num_groups)[to.group], to.where)


def group_mean(x: Array, who: Members, num_groups: int) -> Array:
    """Mean over each member's group, given back to the members: ``[N] -> [N]``."""
    return group_sum(x, who, num_groups) / jnp.maximum(who.size, 1.0)


def above_lowest(x: Array, who: Members, num_groups: int) -> Array:
    """``x`` minus the smallest of its group: ``[N] -> [N]``; exactly 0 throughout a group of equal values."""
    low = jax.ops.segment_min(fill(x, who.where, jnp.inf), who.group, num_groups)[who.group]
    return fill(fill(x, who.where) - fill(low, who.where), who.where)


def centre(x: Array, who: Members, num_groups: int) -> Array:
    """``x`` minus the mean of its group: ``[N] -> [N]``; exactly 0 throughout a group of equal values."""
    lifted = above_lowest(x, who, num_groups)
    return lifted - group_mean(lifted, who, num_groups)


def group_std(x: Array, who: Members, num_groups: int, *, ddof: float = 1) -> Array:
    """Standard deviation of each member's group, ``sqrt(sum (x - mean)^2 / max(n - ddof, 1))``: ``[N] -> [N]``."""
    return jnp.sqrt(group_sum(centre(x, who, num_groups) ** 2, who, num_groups) / jnp.maximum(who.size - ddof, 1.0))


def divide(x: Array, by: Array, eps: float = 0.0) -> Array:
    """``x / (by + eps)``, and 0 where ``x`` is 0 whatever the divisor."""
    safe = jnp.where(x == 0, 1.0, by + eps)
    return jnp.where(x == 0, 0.0, x / safe)


def group_relative(
    ret: Array,
    group: Array,
    num_groups: int,
    *,
    scale: str = "std",
    ddof: float = 1,
    eps: float = 1e-6,
    where: Array | None = None,
    statistics: Array | None = None,
) -> Array:
    """``A_i = (R_i - mean_g) / (sigma + eps)``.

    Args:
      ret: ``[N]``, one return an episode.
      group: ``int32[N]``, group ids.
      num_groups: static bound on the ids.
      scale: "std": sigma of the group (GRPO). "none": no division, ``eps`` unused (Dr.GRPO). "batch": sigma of all
        returns (LitePPO; TRL's "batch"). "batch-centred": sigma of all centred returns (the sequence-level form of
        the REINFORCE++ baseline).
      ddof: 1 (verl, TRL, tunix, OpenRLHF, oat) or 0 (NumPy's default, the Pass@k identity).
      eps: 1e-6 in verl and tunix, 1e-4 in TRL, 1e-8 in oat, 1e-9 in OpenRLHF.
      where: ``bool[N]``, members that count.
      statistics: ``bool[N]``, those among them whose returns enter mean and sigma; all by default. The others are
        measured by them, by their mean alone where their returns are all equal; without any, a group gets 0.

    Returns:
      ``[N]``. A group of equal returns, and a group of one, give exactly 0 (verl gives a lone member its raw return).

    Raises:
      ValueError: unknown ``scale``, negative ``ddof``.

    Per-domain or per-role normalisation is this function with the domain, or domain and role, as the group.
    Sources: GRPO, Shao et al., DeepSeekMath, 2024, arXiv 2402.03300; Dr.GRPO, Liu et al., 2025, 2503.20783;
    LitePPO, Liu et al., Tricks or Traps, 2025, 2508.08221; REINFORCE++, Hu et al., 2025, 2501.03262.
    """
    check_choice("scale", scale, SCALES)
    check_at_least(0, ddof=ddof)
    who = members(group, num_groups, where)
    base = who if statistics is None else members(group, num_groups, who.where & statistics.astype(bool))
    if statistics is None:
        base_size, lifted = who.size, above_lowest(ret, who, num_groups)
    else:
        base_size = group_sum(base.where, base, num_groups, to=who)
        low = jax.ops.segment_min(fill(ret, base.where, jnp.inf), base.group, num_groups)[who.group]
        lifted = fill(fill(ret, who.where) - jnp.where(base_size > 0, low, 0.0), who.where)
    mean = group_sum(lifted, base, num_groups, to=who) / jnp.maximum(base_size, 1.0)
    centred = jnp.where(base_size > 0, lifted - mean, 0.0)
    if scale == "none":
        return jax.lax.stop_gradient(centred)
    if scale == "std":
        var = group_sum(centred**2, base, num_groups, to=who) / jnp.maximum(base_size - ddof, 1.0)
    else:
        var = masked_var(as_float(ret) if scale == "batch" else centred, base.where, ddof=ddof)
    if statistics is not None:
        # Others may differ from members that are all equal: their distance then has no scale but its own.
        var = jnp.where(var > 0, var, 1.0)
    return jax.lax.stop_gradient(divide(centred, jnp.sqrt(var), eps))


def leave_one_out(ret: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """RLOO: ``A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean_g)``.

    ``ret`` ``[N]``, ``group`` ``int32[N]``, ``where`` ``bool[N]`` -> ``[N]``. Equal returns, and a group of one (which
    has no others; verl's loop gives the raw return), give exactly 0.

    Source: Ahmadian et al., Back to Basics, 2024, arXiv 2402.14740; estimator of Kool et al., 2019.
    """
    who = members(group, num_groups, where)
    centred = centre(ret, who, num_groups)
    return jax.lax.stop_gradient(centred * who.size / jnp.maximum(who.size - 1.0, 1.0))


def length_weighted(ret: Array, length: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """OPO: ``A_i = R_i - sum_g len R / sum_g len``, the variance-optimal baseline when gradients grow with length.

    ``ret``, ``length`` (written tokens), ``group`` ``[N]`` -> ``[N]``. A group without tokens gets 0.
    Source: Hao et al., On-Policy RL with Optimal Reward Baseline, 2025, arXiv 2505.23585.
    """
    who = members(group, num_groups, where)
    lifted = above_lowest(ret, who, num_groups)
    total = group_sum(length, who, num_groups)
    baseline = group_sum(as_float(length) * lifted, who, num_groups) / jnp.maximum(total, 1.0)
    return jax.lax.stop_gradient(jnp.where(total > 0, lifted - baseline, 0.0))


def gpg(ret: Array, group: Array, num_groups: int, *, scale: Array | float = 1.0, where: Array | None = None) -> Array:
    """GPG: ``A_i = alpha (R_i - mean_g) / scale``, ``alpha`` = members / members of groups whose returns differ.

    ``[N] -> [N]``; no such group gives 0. The factor makes up for samples without gradient. verl counts non-zero
    raw rewards in its place and gives a lone member its raw return; the paper's intent is followed here.
    Source: Chu et al., GPG, 2025, arXiv 2504.02546.
    """
    who = members(group, num_groups, where)
    centred = centre(ret, who, num_groups)
    useful = jnp.sum(varied(ret, group, num_groups, where=where), dtype=jnp.float32)
    alpha = jnp.sum(who.where, dtype=jnp.float32) / jnp.maximum(useful, 1.0)
    return jax.lax.stop_gradient(alpha * centred / scale)


def varied(ret: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """Members of groups whose returns are not all equal: ``[N] -> bool[N]`` (dynamic sampling keeps these).

    A group of one is never varied (verl keeps it). Source: DAPO, Yu et al., 2025, arXiv 2503.14476.
    """
    who = members(group, num_groups, where)
    lifted = above_lowest(ret, who, num_groups)
    return who.where & (group_sum(lifted > 0, who, num_groups) > 0)


def gdpo(
    rewards: Array,
    weights: Array,
    group: Array,
    num_groups: int,
    *,
    ddof: float = 1,
    eps: float = 1e-4,
    where: Array | None = None,
) -> Array:
    """GDPO: every reward normalised in its group by itself, summed with ``weights``, then normalised over the batch.

    ``rewards`` ``[N, R]``, ``weights`` ``[R]`` -> ``[N]``; both normalisations are ``(x - mean) / (std + eps)`` over
    episodes (verl takes the second over tokens). Equal rewards give 0 before, but not always after, the second one,
    which centres the batch. Source: GDPO, 2026, arXiv 2601.05242.
    """

    def normalise(x, ids, num):
        return group_relative(x, ids, num, ddof=ddof, eps=eps, where=where)

    each = jax.vmap(lambda r: normalise(r, group, num_groups), in_axes=1, out_axes=1)(as_float(rewards))
    who = members(group, num_groups, where)
    return normalise(each @ jnp.asarray(weights, each.dtype), jnp.where(who.where, 0, -1), 1)


def pass_at_k_advantage(correct: Array, group: Array, num_groups: int, *, k: int, where: Array | None = None) -> Array:
    """The analytic advantage of pass@k training, from binary rewards.

    In a group of n with P correct and M = n - P wrong, ``q = C(M, k) / C(n, k)``, ``sigma = sqrt(q (1 - q))``::

      A_correct = q / sigma,    A_wrong = (q - C(M - 1, k - 1) / C(n - 1, k - 1)) / sigma = -q P / (M sigma)

    ``[N] -> [N]``, summing to 0 in a group. All right, all wrong, fewer than k wrong, or a group smaller than k: 0.
    ``k=1`` is ``group_relative(ddof=0, eps=0)``. ``k`` is static. The official code adds 1e-6 to sigma.

    Raises:
      ValueError: ``k < 1``.

    Source: Chen et al., Pass@k Training, 2025, arXiv 2508.10751.
    """
    check_above(0, k=k)
    who = members(group, num_groups, where)
    correct = who.where & (as_float(correct) > 0.5)
    right = group_sum(correct, who, num_groups)
    wrong = who.size - right
    fail = jnp.where(who.size >= k, none_of(wrong, who.size, k), 0.0)
    useful = (fail > 0) & (fail < 1)
    ratio = jnp.sqrt(jnp.where(useful, fail, 0.5) / jnp.where(useful, 1.0 - fail, 0.5))
    adv = jnp.where(correct, ratio, -ratio * right / jnp.maximum(wrong, 1.0))
    return jax.lax.stop_gradient(fill(adv, who.where & useful))


def none_of(wrong: Array, total: Array, k: int) -> Array:
    """``C(wrong, k) / C(total, k)`` as a product of ``k`` factors, elementwise; 0 for ``wrong < k``."""
    j = jnp.arange(k, dtype=jnp.float32)
    factors = (as_float(wrong)[..., None] - j) / jnp.maximum(as_float(total)[..., None] - j, 1.0)
    return jnp.prod(jnp.maximum(factors, 0.0), axis=-1)


def max_at_k_advantage(
    ret: Array, group: Array, num_groups: int, *, k: int, baseline: bool = True, where: Array | None = None
) -> Array:
    """PKPO: unbiased weights for the gradient of the expected best of k, for any real rewards.

    ``A_i = sum over the k-subsets I that hold i of (max_I - max_{I without i}) / C(n, k)``; with ``baseline=False`` the
    second term is left out (unbiased too, of larger variance). Sorted upwards with ranks j from 1, this is
    ``sum_{j < i} C(j - 1, k - 2) (R_i - R_j) / C(n, k)``. ``k=1``: the mean of the group is subtracted, over ``n - 1``
    (there is no subset without i). ``[N] -> [N]``, O(N^2) memory; a group smaller than k gives 0. ``k`` is static.

    Raises:
      ValueError: ``k < 1``.

    Source: Walder and Karkhanis, Pass@K Policy Optimization, 2025, arXiv 2505.15201 (its s, and s with the "loo - 1"
    baseline), from a secondary source; checked against enumeration of subsets.
    """
    check_above(0, k=k)
    who = members(group, num_groups, where)
    lifted = above_lowest(ret, who, num_groups)
    if k == 1:
        scaled = leave_one_out(ret, group, num_groups, where=where) if baseline else fill(ret, who.where)
        return jax.lax.stop_gradient(scaled / jnp.maximum(who.size, 1.0))
    index = jnp.arange(lifted.shape[0])
    below = (lifted[None] < lifted[:, None]) | ((lifted[None] == lifted[:, None]) & (index[None] < index[:, None]))
    mates = who.where[None] & who.where[:, None] & (who.group[None] == who.group[:, None])
    rank = 1.0 + jnp.sum(mates & below, axis=1, dtype=jnp.float32)
    share = _choose_share(rank, who.size, k)
    if baseline:
        adv = jnp.sum(jnp.where(mates & below, share[None] * (lifted[:, None] - lifted[None]), 0.0), axis=1)
    else:
        own = jnp.sum(jnp.where(mates & below, share[None], 0.0), axis=1) * fill(ret, who.where)
        later = jnp.where(mates & ~below & (index[None] != index[:, None]), _choose_share(rank - 1.0, who.size, k), 0.0)
        adv = own + jnp.sum(later * fill(ret, who.where)[None], axis=1)
    return jax.lax.stop_gradient(fill(adv, who.where & (who.size >= k)))


def _choose_share(rank: Array, size: Array, k: int) -> Array:
    """``C(rank - 1, k - 2) / C(size, k)`` for ``k >= 2``, elementwise; 0 where the size is below k."""
    j = jnp.arange(k - 2, dtype=jnp.float32)
    up = jnp.prod(jnp.maximum(rank[..., None] - 1.0 - j, 0.0) / jnp.maximum(size[..., None] - j, 1.0), axis=-1)
    rest = jnp.maximum((size - k + 2.0) * (size - k + 1.0), 1.0)
    return jnp.where(size >= k, up * k * (k - 1) / rest, 0.0)


def best_gap(
    ret: Array, group: Array, num_groups: int, *, ddof: float = 1, eps: float = 1e-6, where: Array | None = None
) -> Array:
    """GRPO_PASSK: the best of a group gets ``(R_max - R_second) / (sigma + eps)``, everyone else 0: ``[N] -> [N]``.

    A tie for the best, and a group of one, give 0. Source: arXiv 2503.19595, as in verl.
    """
    who = members(group, num_groups, where)
    lifted = above_lowest(ret, who, num_groups)
    table = jax.ops.segment_max(fill(lifted, who.where, -1.0), who.group, num_groups)
    best = who.where & (lifted == table[who.group])
    alone = best & (group_sum(best, who, num_groups) == 1) & (who.size > 1)
    second = jax.ops.segment_max(fill(lifted, who.where & ~best, 0.0), who.group, num_groups)[who.group]
    gap = divide(lifted - second, group_std(ret, who, num_groups, ddof=ddof), eps)
    return jax.lax.stop_gradient(fill(gap, alone))
