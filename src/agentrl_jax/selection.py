"""What to roll, what to keep and how often to draw it: filters, allocations and probabilities, all of static shape.

Dropping is clearing a mask; these functions return masks (``bool``), numbers of rolls, or probabilities. Nothing
carries gradient. Group conventions are those of ``groups``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above, check_at_least, check_choice
from agentrl_jax.groups import Members, group_mean, group_std, group_sum, members, none_of
from agentrl_jax.masked import as_float, fill
from agentrl_jax.types import Array


def soft_overlong(length: Array, *, max_length: Array | float, buffer: Array | float) -> Array:
    """DAPO's soft punishment, added to the reward: any shape of lengths in tokens.

    0 up to ``max_length - buffer``, then falling linearly to -1 at ``max_length``, -1 beyond (verl has no floor).
    Source: Yu et al., DAPO, 2025, arXiv 2503.14476 (20480 and 4096).
    """
    check_above(0.0, buffer=buffer)
    return jnp.clip((max_length - buffer - as_float(length)) / buffer, -1.0, 0.0)


def uncertain_groups(
    ret: Array, group: Array, num_groups: int, *, fraction: Array | float = 0.25, where: Array | None = None
) -> Array:
    """StarPO-S: the members of the ``max(1, floor(fraction * P))`` groups with the largest deviation: ``bool[N]``.

    ``P`` counts non-empty groups. Groups of equal returns are never kept: where all are, nothing is, and the step is
    skipped. Source: Wang et al., RAGEN, 2025, arXiv 2504.20073 (fraction .25).
    """
    who = members(group, num_groups, where)
    std = _group_table(group_std(ret, who, num_groups), who, num_groups)
    count = jnp.sum(_group_table(who.where, who, num_groups) > 0, dtype=jnp.float32)
    keep = jnp.maximum(jnp.floor(fraction * count + 1e-4), 1.0)
    return who.where & ((_descending_rank(std) < keep) & (std > 0))[who.group]


def uncertain_mass(
    ret: Array, group: Array, num_groups: int, *, mass: Array | float = 0.9, where: Array | None = None
) -> Array:
    """RAGEN-2: the fewest groups, largest deviation first, that hold ``mass`` of all deviation: ``bool[N]``."""
    who = members(group, num_groups, where)
    std = _group_table(group_std(ret, who, num_groups), who, num_groups)
    order = jnp.argsort(-std)
    before = jnp.cumsum(std[order]) - std[order]
    kept = jnp.zeros(num_groups, bool).at[order].set(before < mass * jnp.sum(std))
    return who.where & (kept & (std > 0))[who.group]


def not_all_correct(correct: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """SRPO's history resampling: members of groups with a wrong answer, mixed or all wrong: ``bool[N]``.

    Source: Zhang et al., SRPO, 2025, arXiv 2504.14286, from a secondary source.
    """
    who = members(group, num_groups, where)
    return who.where & (group_sum(as_float(correct) > 0.5, who, num_groups) < who.size)


def filtration_probability(
    score: Array, *, method: str = "power", power: Array | float = 2.0, where: Array | None = None
) -> Array:
    """PF-PPO: probabilities for drawing the training batch with replacement, ``[N]``, summing to 1.

    "power": proportional to ``|score|^power``; "max-min": the best and the worst; "max-random": .4 for the best, .1
    for the others; plus 1e-8. All-zero scores give equal chances. Meant for a learned, noisy reward: on an exact one
    it only distorts. Source: Shen and Zhang, Policy Filtration, 2024, arXiv 2409.06957; the weights are verl's.
    """
    check_choice("method", method, ("power", "max-min", "max-random"))
    where = jnp.ones(jnp.shape(score), bool) if where is None else where.astype(bool)
    score = fill(score, where)
    best, worst = jnp.max(fill(score, where, -jnp.inf)), jnp.min(fill(score, where, jnp.inf))
    if method == "power":
        weight = jnp.abs(score) ** power
    elif method == "max-min":
        weight = ((score == best) | (score == worst)).astype(score.dtype)
    else:
        weight = jnp.where(score == best, 0.4, 0.1)
    weight = fill(weight + 1e-8, where)
    return jax.lax.stop_gradient(weight / jnp.maximum(jnp.sum(weight), 1e-8))


def replay_probability(adv: Array, where: Array) -> Array:
    """Skywork's selective sample buffer: ``|A| / sum |A|`` over the stored samples, ``[N]``; all 0 without any.

    Source: Wang et al., Skywork R1V2, 2025, arXiv 2504.16656; the rule and the share of replayed samples are
    unconfirmed.
    """
    weight = jnp.abs(fill(adv, where))
    total = jnp.sum(weight)
    return jax.lax.stop_gradient(weight / jnp.where(total > 0, total, 1.0))


def skip_probability(streak: Array, base: Array | float, *, floor: Array | float = 0.01) -> Array:
    """GRESO: chance of skipping a task before rolling it, ``1 - max(base^streak, floor)``, elementwise.

    ``streak`` counts the task's latest consecutive visits whose returns were all equal; 0 is never skipped. ``base``
    differs for easy tasks (all right) and hard ones (all wrong). Source: Zheng et al., Act Only When It Pays, 2025,
    arXiv 2506.02177.
    """
    return 1.0 - jnp.maximum(jnp.power(jnp.asarray(base, jnp.float32), as_float(streak)), floor)


def update_streak(streak: Array, equal: Array, seen: Array) -> Array:
    """GRESO's history: one more where a seen task's returns were all equal, 0 where they differed, else as it was."""
    return jnp.where(seen, jnp.where(equal, streak + 1, 0), streak)


def update_skip_base(
    base: Array,
    share: Array,
    *,
    target: Array | float,
    step: Array | float = 0.01,
    low: Array | float = 0.05,
    high: Array | float = 0.95,
) -> Array:
    """GRESO's self-tuning: ``base`` down by ``step`` when the equal-return share reaches ``target``, else up; clamped.

    The paper's target of 25 % is split 1/3 to easy and 2/3 to hard tasks. Start at .5.
    """
    return jnp.clip(jnp.where(share >= target, base - step, base + step), low, high)


def extra_rolls(
    accuracy: Array,
    rolls: int,
    *,
    max_rolls: int,
    hardness_weighted: bool = False,
    std_normalised: bool = False,
) -> Array:
    """DARS: how many more rolls a task gets after ``rolls`` gave ``accuracy``: ``int32``, any shape.

    With ``S(a) = 2 a (1 - a)`` (``2 sqrt(a (1 - a))`` when advantages are divided by a deviation) and the peak ``A* =
    rolls / 2`` (``rolls``): ``ceil((A* - rolls S) / S)`` (equal treatment) or ``ceil((2 (1 - a) A* - rolls S) / S)``
    (hardness weighted); 0 for ``a >= 1/2``; ``a = 0`` counts as ``1 / (2 rolls)``; at most ``max_rolls - rolls`` (32
    and 64 in the scripts).

    Source: Yang et al., Depth-Breadth Synergy in RLVR, 2025, arXiv 2508.13755.
    """
    check_at_least(rolls, max_rolls=max_rolls)
    a = as_float(accuracy)
    a = jnp.where(a <= 1e-6, 0.5 / rolls, jnp.clip(a, 0.0, 0.5))
    spread = 2.0 * jnp.sqrt(a * (1.0 - a)) if std_normalised else 2.0 * a * (1.0 - a)
    peak = float(rolls) if std_normalised else 0.5 * rolls
    goal = 2.0 * (1.0 - a) * peak if hardness_weighted else jnp.full_like(a, peak)
    extra = jnp.ceil((goal - rolls * spread) / spread - 1e-4)  # the margin absorbs float32 rounding
    return jnp.where(a >= 0.5, 0, jnp.clip(extra, 0, max_rolls - rolls)).astype(jnp.int32)


def hint_fraction(solved: Array, fraction: Array, *, step: float = 0.25, limit: float = 0.75) -> Array:
    """GHPO: the share of the reference solution to show next: as it was once solved, else ``step`` more.

    At most ``limit``. Source: Liu et al., GHPO, 2025, arXiv 2507.10628 (25, 50, 75 %, of the characters).
    """
    return jnp.where(solved, fraction, jnp.minimum(as_float(fraction) + step, limit))


def branch_score(draw: Array, entropy_change: Array, *, alpha: Array | float = 0.2) -> Array:
    """ARPO: ``clip(draw - alpha * entropy_change, 0, 1)``; branch after a tool result iff at most .5. Elementwise.

    ``draw`` is uniform in [0, 1); the change is of the mean entropy of the first tokens after the result, divided by
    the log of the vocabulary's size, against the first turn's. Source: Dong et al., ARPO, 2025, arXiv 2507.19849.
    """
    return jnp.clip(draw - alpha * entropy_change, 0.0, 1.0)


def call_penalty(calls: Array, errors: Array, answers: Array, turns: Array) -> Array:
    """GRPO-RoC's untidiness of a correct episode: tool errors plus answer format, elementwise, in [0, 2].

    ``errors / calls`` (1/2 without a call) plus ``min((answers - 1) / turns, 1)`` (1 without an answer).
    Source: Shang et al., rStar2-Agent, 2025, arXiv 2508.20722, and its repository.
    """
    calls, errors, answers, turns = (as_float(x) for x in (calls, errors, answers, turns))
    failing = jnp.where(calls > 0, errors / jnp.maximum(calls, 1.0), 0.5)
    return failing + jnp.where(answers > 0, jnp.minimum((answers - 1.0) / jnp.maximum(turns, 1.0), 1.0), 1.0)


def resample_on_correct(
    ret: Array,
    penalty: Array,
    group: Array,
    num_groups: int,
    key: Array | None = None,
    *,
    keep: int,
    min_failed: int = 0,
    min_correct: int = 0,
    where: Array | None = None,
) -> Array:
    """GRPO-RoC: of an over-sampled group, the ``keep`` episodes to train on: ``bool[N]``.

    Correct (``ret > 0``) and failed episodes keep their proportion (rounded), with at least ``min_correct`` and
    ``min_failed`` of each where there are as many. With a ``key`` (consumed) failures are drawn uniformly and correct
    ones without replacement with chances inversely proportional to ``penalty`` (plus .01), as the paper says;
    without, the smallest penalties of both kinds stay, as the released code does. A group of at most ``keep`` stays
    whole.

    Source: Shang et al., rStar2-Agent, 2025, arXiv 2508.20722.
    """
    check_at_least(min_failed + min_correct, keep=keep)
    who = members(group, num_groups, where)
    correct = who.where & (as_float(ret) > 0)
    penalty = fill(penalty, who.where)
    order = penalty if key is None else _gumbel_order(penalty, correct, key)
    right = group_sum(correct, who, num_groups)
    wrong = who.size - right
    take = jnp.round(right * keep / jnp.maximum(who.size, 1.0))
    low = jnp.maximum(keep - wrong, jnp.minimum(min_correct, right))
    high = jnp.minimum(right, keep - jnp.minimum(min_failed, wrong))
    take = jnp.where(who.size <= keep, right, jnp.clip(take, low, jnp.maximum(low, high)))
    rest = jnp.where(who.size <= keep, wrong, keep - take)
    rank = _rank_within(order, who.group * 2 + correct, who.where)
    return who.where & (rank < jnp.where(correct, take, rest))


def _gumbel_order(penalty: Array, correct: Array, key: Array) -> Array:
    """Ascending order = drawing without replacement, correct ones with chances ``1 / (penalty + .01)``."""
    log_weight = jnp.where(correct, -jnp.log(penalty + 0.01), 0.0)
    return -(log_weight + jax.random.gumbel(key, penalty.shape))


def _rank_within(order: Array, group: Array, where: Array) -> Array:
    """Rank of each member in its group by ascending ``order``, ties by position: ``int32[N]``."""
    size = order.shape[0]
    perm = jnp.lexsort((order, jnp.where(where, group, jnp.iinfo(jnp.int32).max)))
    sorted_group = jnp.where(where, group, -1)[perm]
    position = jnp.arange(size)
    start = jnp.concatenate([jnp.ones(1, bool), sorted_group[1:] != sorted_group[:-1]])
    first = jax.lax.cummax(jnp.where(start, position, 0))
    return jnp.zeros(size, jnp.int32).at[perm].set((position - first).astype(jnp.int32))


def pass_at_k(total: Array, correct: Array, *, k: int) -> Array:
    """Unbiased pass@k of ``correct`` among ``total`` samples: ``1 - C(total - correct, k) / C(total, k)``, elementwise.

    ``k`` is static. Average over problems, not over pooled samples. Fewer samples than k have no estimate: NaN.
    Source: Chen et al., Evaluating Large Language Models Trained on Code, 2021, arXiv 2107.03374.

    Raises:
      ValueError: ``k < 1``, or ``k > total`` for a Python number.
    """
    check_above(0, k=k)
    check_at_least(k, total=total)
    total, correct = as_float(total), as_float(correct)
    return jnp.where(total >= k, 1.0 - none_of(total - correct, total, k), jnp.nan)


def max_at_k(value: Array, *, k: int) -> Array:
    """Unbiased expected best of k from n samples of real reward: ``[n] -> []``, ``k`` static.

    ``sum_i C(i - 1, k - 1) / C(n, k) r_(i)``, rewards ascending. Source: Walder and Karkhanis, 2025, arXiv 2505.15201.

    Raises:
      ValueError: ``k`` outside ``[1, n]``.
    """
    n = value.shape[0]
    check_above(0, k=k)
    check_at_least(k, samples=n)
    smaller = jnp.arange(n, dtype=jnp.float32)
    below = jnp.prod((smaller[:, None] + 1.0 - jnp.arange(k)) / (n - jnp.arange(k, dtype=jnp.float32)), axis=1)
    weight = jnp.where(smaller + 1 >= k, below * k / (smaller + 1.0), 0.0)
    return jnp.sum(weight * jnp.sort(as_float(value)))


def best_of_group(ret: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """RAFT, best-of-n: the first member with its group's highest return, ``bool[N]``: one a non-empty group."""
    who = members(group, num_groups, where)
    rank = _rank_within(-fill(ret, who.where), who.group, who.where)
    return who.where & (rank == 0)


def accuracy_of_group(correct: Array, group: Array, num_groups: int, *, where: Array | None = None) -> Array:
    """Share of correct members of each group: ``[N] -> [num_groups]``; 0 for an empty one."""
    who = members(group, num_groups, where)
    return _group_table(group_mean(as_float(correct) > 0.5, who, num_groups), who, num_groups)


def _group_table(x: Array, who: Members, num_groups: int) -> Array:
    """From a number equal for all members of a group to one a group: ``[N] -> [num_groups]``, 0 for an empty one."""
    table = jax.ops.segment_max(fill(x, who.where, -jnp.inf), who.group, num_groups)
    return jnp.where(jnp.isfinite(table), table, 0.0)


def _descending_rank(x: Array) -> Array:
    """Rank by descending value, ties by position: ``[P] -> [P]``."""
    return jnp.zeros(x.shape[0], jnp.int32).at[jnp.argsort(-x)].set(jnp.arange(x.shape[0], dtype=jnp.int32))
