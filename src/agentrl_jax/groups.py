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
    group = jnp.where(counts, group, 0)
    size = jax.ops.segment_sum(counts.astype(jnp.float32), group, num_groups)[group]
    return Members(counts, group, size)


def group_sum(x: Array, who: Members, num_groups: int) -> Array:
    """Sum over each member's group, given back to the members: ``[N] -> [N]``, 0 for those who do not count."""
    return fill(jax.ops.segment_sum(fill(x, who.where), who.group, num_groups)[who.group], who.where)


def group_mean(x: Array, who: Members, num_groups: int) -> Array:
    """Mean over each member's group, given back to the members: ``[N] -> [N]``."""
    return group_sum(x, who, num_groups) / jnp.maximum(who.size, 1.0)


def above_lowest(x: Array, who: Members, num_groups: int) -> Array:
    """``x`` minus the smallest of its group: ``[N] -> [N]``; exactly 0 throughout a group of equal values."""
    low = jax.ops.segment_min(fill(x, who.where, jnp.inf), who.group, num_groups)[who.group]
    return fill(fill(x, who.where) - fill(low, who.where), who.where)


def group_std(x: Array, who: Members, num_groups: int, *, ddof: float = 1) -> Array:
    """Standard deviation of each member's group, ``sqrt(sum (x - mean)^2 / max(n - ddof, 1))``: ``[N] -> [N]``."""
    shifted = above_lowest(x, who, num_groups)
    centred = shifted - group_mean(shifted, who, num_groups)
    return jnp.sqrt(group_sum(centred**2, who, num_groups) / jnp.maximum(who.size - ddof, 1.0))


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

    Returns:
      ``[N]``. A group of equal returns, and a group of one, give exactly 0 (verl gives a lone member its raw return).

    Raises:
      ValueError: unknown ``scale``.

    Per-domain or per-role normalisation is this function with the domain, or domain and role, as the group.
    Sources: GRPO, Shao et al., DeepSeekMath, 2024, arXiv 2402.03300; Dr.GRPO, Liu et al., 2025, 2503.20783;
    LitePPO, Liu et al., Tricks or Traps, 2025, 2508.08221; REINFORCE++, Hu et al., 2025, 2501.03262.
    """
    if scale not in SCALES:
        raise ValueError(f"Unknown scale {scale!r}. Known scales: {', '.join(SCALES)}.")
    who = members(group, num_groups, where)
    shifted = above_lowest(ret, who, num_groups)
    centred = shifted - group_mean(shifted, who, num_groups)
    if scale == "none":
        return jax.lax.stop_gradient(centred)
    if scale == "std":
        sigma = group_std(ret, who, num_groups, ddof=ddof)
    else:
        sigma = jnp.sqrt(masked_var(as_float(ret) if scale == "batch" else centred, who.where, ddof=ddof))
    return jax.lax.stop_gradient(divide(centred, sigma, eps))


def leave_one_out(ret: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """RLOO: ``A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean_g)``.

    ``ret`` ``[N]``, ``group`` ``int32[N]``, ``where`` ``bool[N]`` -> ``[N]``. Equal returns, and a group of one (which
    has no others; verl's loop gives the raw return), give exactly 0.

    Source: Ahmadian et al., Back to Basics, 2024, arXiv 2402.14740; estimator of Kool et al., 2019.
    """
    who = members(group, num_groups, where)
    shifted = above_lowest(ret, who, num_groups)
    centred = shifted - group_mean(shifted, who, num_groups)
    return jax.lax.stop_gradient(centred * who.size / jnp.maximum(who.size - 1.0, 1.0))
