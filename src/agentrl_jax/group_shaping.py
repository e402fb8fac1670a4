"""Advantages below the level of an episode: anchor states, turns, trees, entropy, tokens.

Conventions of ``groups``: group ids with a static bound, ``where=`` for those that count, exactly 0 where all is
equal, no gradient through. ``N`` episodes, ``K`` turns, ``T`` tokens. ``advantages.spread_turns`` gives tokens their
turn's number.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_choice
from agentrl_jax.groups import above_lowest, group_mean, group_relative, members, varied
from agentrl_jax.masked import as_float, fill
from agentrl_jax.types import Array


def dense_ids(*keys: Array, where: Array) -> Array:
    """Equal tuples of keys get equal ids in ``[0, M)``: ``[M]`` each ``-> int32[M]``; -1 where not ``where``.

    By sorting, so any integer keys do (hashes, for instance).
    """
    out = (~where).astype(jnp.int32)
    order = jnp.lexsort((*reversed(keys), out))
    change = (
        jnp.zeros(where.shape, bool)
        .at[1:]
        .set(jnp.any(jnp.stack([k[order][1:] != k[order][:-1] for k in keys]), axis=0))
    )
    ids = jnp.zeros(where.shape, jnp.int32).at[order].set(jnp.cumsum(change).astype(jnp.int32))
    return jnp.where(where, ids, -1)


def step_relative(
    value: Array,
    anchor: Array,
    played: Array,
    group: Array,
    *,
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
) -> Array:
    """Turns compared with the turns of the same group at the same anchor: ``[N, K] -> [N, K]``.

    ``anchor`` ``int[N, K]`` says what is comparable: a hash of what the agent saw (GiGPO), a tag of what it did
    (``tag_relative``). ``played`` ``bool[N, K]``, ``group`` ``int32[N]``. A turn alone at its anchor gets 0. Equal
    hashes count as equal states.
    """
    rows = jnp.broadcast_to(jnp.asarray(group)[:, None], value.shape).ravel()
    ids = dense_ids(rows, jnp.asarray(anchor).ravel(), where=(played.astype(bool) & (group >= 0)[:, None]).ravel())
    adv = group_relative(value.ravel(), ids, ids.shape[0], scale=scale, ddof=ddof, eps=eps)
    return adv.reshape(value.shape)


def gigpo(
    reward: Array,
    anchor: Array,
    played: Array,
    group: Array,
    num_groups: int,
    *,
    discount: Array | float = 0.95,
    omega: Array | float = 1.0,
    scale: str = "none",
    episode_statistics: str = "episode",
    ddof: float = 1,
    eps: float = 1e-6,
) -> Array:
    """GiGPO: ``A_k = A_episode + omega * A_step``, for every turn: ``[N, K]``.

    ``A_episode`` is group-relative in the sum of rewards; ``A_step`` compares discounted returns to go of turns with
    the same anchor in the same group (``step_relative``).

    Args:
      reward: ``[N, K]`` per turn; read where played.
      anchor: ``int[N, K]``, hash of what the agent saw before the turn.
      played: ``bool[N, K]``. An episode without a played turn does not count.
      group: ``int32[N]``; ``num_groups`` bounds it.
      discount, omega: .95 and 1 in the paper.
      scale: "none" (the code's default) or "std", for both parts.
      episode_statistics: "episode" counts each episode once, as the paper; "step" once a turn, as the code does.
      ddof, eps: of the deviation.

    Source: Feng et al., Group-in-Group Policy Optimization, 2025, arXiv 2505.10978.
    """
    check_choice("episode_statistics", episode_statistics, ("episode", "step"))
    played = played.astype(bool)
    reward = fill(reward, played)
    total = jnp.sum(reward, axis=1)
    relative = functools.partial(group_relative, scale=scale, ddof=ddof, eps=eps)
    if episode_statistics == "episode":
        episode = relative(total, group, num_groups, where=jnp.any(played, 1))[:, None]
    else:
        each = jnp.broadcast_to(total[:, None], reward.shape).ravel()
        rows = jnp.broadcast_to(group[:, None], reward.shape).ravel()
        episode = relative(each, rows, num_groups, where=played.ravel()).reshape(reward.shape)
    step = step_relative(_returns(reward, played, discount), anchor, played, group, scale=scale, ddof=ddof, eps=eps)
    return fill(episode + omega * step, played)


def tag_relative(
    reward: Array,
    ret: Array,
    tag: Array,
    played: Array,
    group: Array,
    num_groups: int,
    *,
    coef: Array | float = 1.0,
    scale: str = "none",
    ddof: float = 1,
    eps: float = 1e-6,
) -> Array:
    """RLVMR: ``A_k = A_episode + coef * A_tag``, for every turn: ``[N, K]``.

    ``A_episode`` is group-relative in ``ret`` ``[N]``; ``A_tag`` compares the reward of a turn, its own and not what
    follows, with those of the group's turns under the same tag (``step_relative``).

    The tags are how a turn says that it reasons (planning, exploring, reflecting, none), and the rewards are rules: a
    valid turn that plans is paid if the episode succeeds; one that explores, if no valid turn before it had its action;
    one that reflects, if the action before it was invalid and this one differs; all else 0. They are an
    environment's to find, which sees what is written.

    Args:
      reward: ``[N, K]``, what a turn is paid for its tag.
      ret: ``[N]``, outcome.
      tag: ``int[N, K]``, equal for turns to be compared.
      played: ``bool[N, K]``. An episode without a played turn does not count.
      group: ``int32[N]``; ``num_groups`` bounds it.
      coef: 1 in the official scripts.
      scale: "none" (the code's default) or "std", for both parts.
      ddof, eps: of the deviation.

    Formula, rules and defaults are the official repository's. It counts an episode once a turn, and gives a group of
    one its raw reward; here an episode counts once, and one alone gets 0.
    Source: Zhang et al., RLVMR, 2025, arXiv 2507.22844.
    """
    played = played.astype(bool)
    episode = group_relative(ret, group, num_groups, where=jnp.any(played, 1), scale=scale, ddof=ddof, eps=eps)
    turn = step_relative(fill(reward, played), tag, played, group, scale=scale, ddof=ddof, eps=eps)
    return fill(episode[:, None] + coef * turn, played)


def _returns(reward: Array, played: Array, discount: Array | float) -> Array:
    """Discounted returns to go over played turns, ``[N, K]``."""

    def step(carry, inputs):
        here, on = inputs
        carry = jnp.where(on, here + discount * carry, carry)
        return carry, carry

    start = jnp.zeros(reward.shape[0], reward.dtype)
    return fill(jax.lax.scan(step, start, (reward.T, played.T), reverse=True)[1].T, played)


def turn_relative(
    turn_reward: Array,
    outcome: Array,
    played: Array,
    group: Array,
    num_groups: int,
    *,
    coef: Array | float = 1.0,
    ddof: float = 1,
    eps: float = 1e-4,
    where: Array | None = None,
) -> Array:
    """Turn-level GRPO: ``A_k = A_outcome + coef * A_turn_k`` for turns before the last, ``A_outcome`` for the last.

    ``turn_reward`` ``[N, K]`` and ``outcome`` ``[N]`` are normalised in the group apart, turn k over the members for
    whom it is not the last. An episode of one turn (no tool was used) gets the advantage of the sum of both, among
    all. ``played`` ``bool[N, K]`` -> ``[N, K]``.

    Source: Zeng et al., Turn-Level Credit Assignment, 2025, arXiv 2505.11821. The paper's code has two turns; the
    form for K turns is ours, and equals it for two.
    """
    played = played.astype(bool)
    turns = jnp.sum(played, axis=1)
    early = played & (jnp.cumsum(played, axis=1) < turns[:, None])
    who = members(group, num_groups, where).where & (turns > 0)
    relative = functools.partial(group_relative, ddof=ddof, eps=eps)
    result = relative(outcome, group, num_groups, where=who)
    each = jax.vmap(lambda r, w: relative(r, group, num_groups, where=w & who), in_axes=1, out_axes=1)(
        as_float(turn_reward), early
    )
    total = as_float(outcome) + jnp.sum(fill(turn_reward, played), axis=1)
    combined = relative(total, group, num_groups, where=who)
    return fill(jnp.where(turns == 1, combined, result)[:, None] + coef * each, played)


def process_relative(
    step_reward: Array, played: Array, group: Array, num_groups: int, *, ddof: float = 1, eps: float = 1e-6
) -> Array:
    """GRPO with process supervision: ``A_k = sum_{j >= k} (r_j - mean) / (std + eps)``.

    Mean and deviation are over all step rewards of the group. ``[N, K]``, ``played`` ``bool[N, K]`` -> ``[N, K]``.
    Source: Shao et al., DeepSeekMath, 2024, arXiv 2402.03300.
    """
    played = played.astype(bool)
    rows = jnp.broadcast_to(group[:, None], step_reward.shape).ravel()
    each = group_relative(step_reward.ravel(), rows, num_groups, ddof=ddof, eps=eps, where=played.ravel())
    return fill(jnp.cumsum(each.reshape(step_reward.shape)[:, ::-1], axis=1)[:, ::-1], played)


def optimal_token(
    ret: Array, energy: Array, mask: Array, group: Array, num_groups: int, *, where: Array | None = None
) -> Array:
    """Optimal token baseline: ``A_it = G_it - sum_j G_jt W_jt / sum_j W_jt`` over the group's members: ``[N, T]``.

    ``t`` counts written tokens, so that members whose observations differ are compared at the same token of theirs;
    ``W_it`` is the sum of ``energy`` over the first ``t`` written tokens. A position that a single member of the group
    reaches gives exactly 0 (verl leaves the raw return there).

    Args:
      ret: ``[N, T]``, return to go.
      energy: ``[N, T]``, a token's ``1 - 2 pi + sum_v pi_v^2``, the squared norm of the gradient in its logits.
      mask: ``bool[N, T]``, written tokens.
      group: ``int32[N]``; ``num_groups`` bounds it.
      where: ``bool[N]``, members that count.

    Source: Li et al., The Optimal Token Baseline, 2026, arXiv 2602.07078, and verl (``tir_optimal_token_baseline``).
    """
    where = jnp.ones(group.shape, bool) if where is None else where.astype(bool)
    mask = mask.astype(bool) & where[:, None]
    place = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, mask.shape[1])
    compact = jax.vmap(lambda x, p: jnp.zeros_like(x).at[p].set(x, mode="drop"))
    weight = compact(jnp.cumsum(jnp.maximum(fill(energy, mask), 0.0), axis=1), place)
    there = compact(mask.astype(jnp.float32), place)
    seen = compact(fill(ret, mask), place)
    total = lambda x: jax.ops.segment_sum(x, jnp.where(where, group, 0), num_groups)[group]  # noqa: E731
    # Where the policy is certain no weight is left, and the members count alike.
    weight = jnp.where(total(weight * there) > 0, weight, 1.0) * there
    mates = total(there)
    # Differences to a member's own return: equal ones, and one alone, give exactly 0.
    lowest = jax.ops.segment_min(jnp.where(there > 0, seen, jnp.inf), jnp.where(where, group, 0), num_groups)[group]
    above = jnp.where(there > 0, seen - jnp.where(jnp.isfinite(lowest), lowest, 0.0), 0.0)
    whole = total(weight)
    base = total(weight * above) / jnp.where(whole > 0, whole, 1.0)
    adv = jnp.where((mates > 1) & (there > 0), above - base, 0.0)
    back = jnp.take_along_axis(adv, jnp.minimum(place, mask.shape[1] - 1), axis=1)
    return jax.lax.stop_gradient(fill(back, mask))


def tree_relative(
    ret: Array,
    subgroup: Array,
    num_subgroups: int,
    *,
    weight: str = "group_size",
    skip_equal: bool = False,
    where: Array | None = None,
) -> Array:
    """TreePO: returns relative to nested sub-trees, averaged: ``A_i = sum_j w_j (R_i - mean_{g_j}) / sum_j w_j``.

    ``subgroup`` ``int32[N, J + 1]`` holds the ids of the sub-trees a leaf belongs to, the whole group first (at every
    depth ids in ``[0, num_subgroups)``, -1 for none; ``token_owner`` at chosen positions makes them). Depth 0 always
    takes part, deeper ones when they have another leaf, and, with ``skip_equal``, unless their returns are all equal.
    ``w_j`` is the size of the sub-tree ("group_size") or 1 ("average", the launch script's choice). ``[N] -> [N]``;
    the code whitens the batch after it (``masked.whiten``). One depth is Dr.GRPO.

    Source: Li et al., TreePO, 2025, arXiv 2508.17445. The paper prints a mean over depths divided by a deviation whose
    set is ambiguous; the code is followed.
    """
    check_choice("weight", weight, ("group_size", "average"))
    top, bottom = jnp.zeros(jnp.shape(ret), jnp.float32), jnp.zeros(jnp.shape(ret), jnp.float32)
    for depth in range(subgroup.shape[1]):
        who = members(subgroup[:, depth], num_subgroups, where)
        counts = who.where
        if depth > 0:
            counts = counts & (who.size > 1)
            if skip_equal:
                counts = counts & varied(ret, subgroup[:, depth], num_subgroups, where=where)
        lifted = above_lowest(ret, who, num_subgroups)
        w = jnp.where(counts, who.size if weight == "group_size" else 1.0, 0.0)
        top += w * (lifted - group_mean(lifted, who, num_subgroups))
        bottom += w
    return jax.lax.stop_gradient(top / jnp.maximum(bottom, 1.0))


def token_owner(parent: Array, branch: Array, length: int) -> Array:
    """The row a token of a branched row was first written in: ``int32[N, length]``.

    ``parent`` ``int32[N]`` (-1 without) and ``branch`` ``int32[N]``, the first token of a row's own, as in
    ``Trajectory``. Two rows share a token exactly where their owners are equal.
    """
    rows = jnp.arange(parent.shape[0], dtype=jnp.int32)[:, None]
    inherited = (jnp.arange(length)[None] < branch[:, None]) & (parent >= 0)[:, None]
    owner = jnp.where(inherited, parent[:, None].astype(jnp.int32), rows)
    for _ in range(max(1, math.ceil(math.log2(max(parent.shape[0], 2))))):
        owner = jnp.take_along_axis(owner, owner, axis=0)
    return owner


def shared_prefix_mean(adv: Array, owner: Array, mask: Array) -> Array:
    """ARPO's hard attribution: a token shared by several branches gets the mean of their advantages.

    ``adv`` ``[N]``, ``owner`` ``int32[N, T]`` (``token_owner``), ``mask`` ``bool[N, T]`` -> ``[N, T]``. Without it
    every leaf keeps its own, and the copies average in the loss (the soft form, ARPO's default).
    Source: Dong et al., ARPO, 2025, arXiv 2507.19849.
    """
    size = adv.shape[0]
    value = jnp.broadcast_to(as_float(adv)[:, None], mask.shape)

    def column(x, own, on):
        who = members(own, size, on)
        return group_mean(x, who, size)

    return jax.lax.stop_gradient(jax.vmap(column, in_axes=1, out_axes=1)(value, owner, mask))


def entropy_scaled(
    adv: Array,
    entropy: Array,
    group: Array,
    num_groups: int,
    *,
    low: float = 0.1,
    high: float = 10.0,
    where: Array | None = None,
) -> Array:
    """EDGE-GRPO: ``A_i * mean_g(H) / H_i``, the factor clamped to ``[low, high]``: ``[N] -> [N]``.

    ``entropy`` ``[N]`` is the mean over a response's written tokens (the code averages padding too, and lets gradient
    through; neither here). The clamp stands commented out in the code: ``low=0, high=inf`` removes it.
    Source: Zhang et al., EDGE-GRPO, 2025, arXiv 2507.21848.
    """
    who = members(group, num_groups, where)
    entropy = fill(entropy, who.where)
    mean = group_mean(entropy, who, num_groups)
    factor = jnp.where(entropy > 0, mean / jnp.where(entropy > 0, entropy, 1.0), jnp.where(mean > 0, high, 1.0))
    return jax.lax.stop_gradient(fill(adv, who.where) * jnp.clip(factor, low, high))


def entropy_shaped(adv: Array, entropy: Array, *, alpha: Array | float = 0.4, kappa: Array | float = 2.0) -> Array:
    """``A + min(alpha * H, |A| / kappa)``, any shape: a bonus for uncertain tokens that never flips a sign.

    ``A = 0`` gets no bonus. Source: Cheng et al., Reasoning with Exploration, 2025, arXiv 2506.14758, from a
    third-party implementation.
    """
    adv = as_float(adv)
    return jax.lax.stop_gradient(adv + jnp.minimum(alpha * as_float(entropy), jnp.abs(adv) / kappa))


def aspo_shaping(
    adv: Array,
    position: Array,
    length: Array,
    group: Array,
    num_groups: int,
    *,
    where: Array,
    delta: Array | float = -2.0,
    bound: Array | float = 0.7,
) -> Array:
    """ASPO, Advantage Shaping: earlier tool calls are preferred among the correct answers that use the tool.

    ``A_i + clip(delta (p_i - mean p) / mean L, -bound |A_i|, bound |A_i|)`` for the members in ``where`` (correct and
    with a tool call), means over those of the same group; others keep ``A_i``. ``adv``, ``position`` (first token of
    the first call), ``length``: ``[N] -> [N]``. A lone member keeps its advantage. ``bound < 1`` keeps the sign.

    Source: Lin and Xu, Understanding Tool-Integrated Reasoning, 2025, arXiv 2508.19201; (delta, bound) of (-1.5, .7)
    and (-2, .9) there, where "delta = 1.5" is printed once without its sign. The default is a third-party recipe's.
    """
    who = members(group, num_groups, where)
    adv = as_float(adv)
    lifted = above_lowest(position, who, num_groups)
    mean_length = jnp.maximum(group_mean(length, who, num_groups), 1.0)
    bias = delta * (lifted - group_mean(lifted, who, num_groups)) / mean_length
    limit = bound * jnp.abs(adv)
    return jax.lax.stop_gradient(adv + fill(jnp.clip(bias, -limit, limit), who.where))
