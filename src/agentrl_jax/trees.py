"""Collecting by branching: Monte-Carlo values at turn boundaries, trees of episodes, pairs that differ in one step.

All of it continues episodes from a boundary between turns, environment state and token stream alike
(``branching.branch``), inside the same program. Contexts that restart are not branched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax import advantages, branching, credit, group_shaping, preference, scoring, selection, stages
from agentrl_jax.algorithm import Tools
from agentrl_jax.checks import check_at_least, check_choice
from agentrl_jax.masked import fill, masked_sum
from agentrl_jax.parts import Part, note
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Start, Trajectory

RULES = ("uniform", "entropy")
"""How ``tree`` chooses where a leaf branches off."""

_HEAD = 20
"""Tokens after a tool result whose entropy ARPO reads."""

# Calls and draws of one step fold its key with different numbers: `Tools.roll` takes the first two.
_MAIN, _BRANCHES, _DRAW = 0, 1, 2

_ONE_ROW = frozenset({"one_segment"})


def vine(rolls: int = 4) -> Part:
    """Collects episodes and, from every turn boundary, ``rolls`` continuations whose mean return to go is its value.

    ``V(s_k) = mean_j sum_{i >= k} discount^(i - k) r_i`` over the continuations; after the last turn it is 0, also
    where a limit cut the episode, since it cuts the continuations too. Group mates share their first boundary, and
    so its ``rolls`` continuations. ``traj.record`` becomes ``{"mc_value": float32[N, K + 1]}``, the value before every
    turn and after the last (0 where nothing was written), for ``vine_advantage``. Per turn it would be summed in the
    metrics: there ``mc_value`` is the first boundary's, and ``extra_tokens`` are the tokens of the continuations, for
    each episode.

    Raises:
      ValueError: ``rolls < 1``.

    Source: Kazemnejad et al., VinePPO, 2024, arXiv 2410.01679 (9 rolls, discount 1; steps of reasoning there, turns
    here).
    """
    check_at_least(1, rolls=rolls)

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        traj = tools.roll(key, call=_MAIN, record=True)
        episodes, turns = traj.steps["played"].shape
        mate = jnp.arange(episodes) // tools.group_size * tools.group_size
        starts = branching.turn_starts(traj)
        mine = starts.at[:, 0].set(jnp.where(mate == jnp.arange(episodes), starts[:, 0], -1))
        row, token = jnp.repeat(jnp.arange(episodes), turns * rolls), jnp.repeat(mine.ravel(), rolls)
        more = tools.roll(
            key, call=_BRANCHES, start=_unrecorded(branching.branch(traj, row, token)), episodes=row.shape[0],
            group_size=1,
        )  # fmt: skip
        value = _boundary_values(more, episodes, rolls, hyper["discount"])
        value = jnp.where(starts >= 0, value.at[:, 0].set(value[mate, 0]), 0.0)
        traj = traj._replace(record={"mc_value": jnp.pad(value, ((0, 0), (0, 1)))})
        return memory, note(traj, mc_value=value[:, 0], extra_tokens=jnp.sum(_own(more), dtype=jnp.float32) / episodes)

    return Part("vine", collect=collect, hyper={"discount": 1.0}, needs=_ONE_ROW)


def _unrecorded(start: Start) -> Start:
    """Without the earlier states: a rollout that keeps no record has no use for them."""
    assert start.prefix is not None
    return start._replace(prefix=start.prefix._replace(record=None))


def _own(traj: Trajectory) -> Array:
    """What a row wrote itself, beyond what it was branched with: ``bool[B, T]``."""
    return traj.mask & (jnp.arange(traj.mask.shape[1]) >= traj.branch[:, None])


def _boundary_values(more: Trajectory, episodes: int, rolls: int, discount: Array) -> Array:
    """Mean discounted returns to go of continuations ``(episode, turn, roll)``: ``float32[N, K]``."""
    turns = more.steps["played"].shape[1]
    begun = jnp.tile(jnp.repeat(jnp.arange(turns), rolls), episodes)
    ahead = jnp.arange(turns) - begun[:, None]
    weight = jnp.where(ahead >= 0, discount ** jnp.maximum(ahead, 0), 0.0)
    togo = jnp.sum(weight * more.steps["reward"], axis=1)
    step = jnp.where(more.length > 0, begun, -1)
    value = functools.partial(advantages.monte_carlo_values, num_steps=turns)
    return jax.vmap(value)(togo.reshape(episodes, -1), step.reshape(episodes, -1))


def vine_advantage() -> Part:
    """VinePPO: ``A_k = r_k + discount * V(s_{k+1}) - V(s_k)`` on every token of turn k, of the values of ``vine``.

    ``V`` after the last turn is 0. The method whitens the batch after it (``stages.whiten``).
    Source: as ``vine``.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del key
        traj = batch.traj
        if not isinstance(traj.record, dict) or "mc_value" not in traj.record:
            raise ValueError("vine_advantage needs the values that the collector vine keeps in traj.record")
        value = traj.record["mc_value"][:, :-1]
        estimate = functools.partial(advantages.step_advantage, discount=hyper["discount"])
        adv = jax.vmap(estimate)(credit.turn_rewards(batch, tools), value, branching.turn_starts(traj) >= 0)
        adv = jax.vmap(advantages.spread_turns)(adv, traj.turn, batch.mask)
        return memory, batch._replace(adv=adv, traj=traj._replace(record=None)), {}

    return Part("vine_advantage", stage, hyper={"discount": 1.0}, needs=_ONE_ROW)


def tree(roots: int, *, rule: str = "uniform") -> Part:
    """Collects groups that are trees: ``roots`` episodes from the start, the others branch off them after a result.

    Of a group's ``G`` rows the first ``roots`` are rolled as ever; the rest share one of these (in turn) up to a turn
    ``k >= 1``, that is, up to an observation of the environment, and go on by themselves. ``traj.parent`` is the row of
    the root in this trajectory, ``traj.branch`` the first own token.

    - "uniform": ``k`` is uniform among the root's turns ``>= 1``;
    - "entropy" (ARPO): the first turn with ``branch_score(u, dH, alpha) <= threshold``, where ``dH`` is the mean
      entropy of the turn's first 20 tokens, over the log of the vocabulary's size, minus that of the first turn
      (``hyper["branch_alpha"]``, ``hyper["branch_threshold"]``). Every leaf draws its own ``u``.

    Where no turn qualifies ``k`` is 0: the leaf shares the prompt alone. Nothing is thrown away; tokens of the agent
    that were inherited, not sampled, are the metric ``inherited_tokens``.

    Raises:
      ValueError: ``roots < 1`` or an unknown rule; when collecting, ``roots`` not below the group size.

    Sources: Li et al., TreePO, 2025, arXiv 2508.17445 (segments of fixed length there, turns here); Dong et al., ARPO,
    2025, arXiv 2507.19849 (8 roots of 16, alpha .2, threshold .5; leaves that find no turn are drawn afresh there too).
    """
    check_at_least(1, roots=roots)
    check_choice("rule", rule, RULES)

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        leaves = tools.group_size - roots
        if leaves < 1:
            raise ValueError(f"roots must be below group_size ({tools.group_size}), got {roots}")
        base = tools.roll(key, call=_MAIN, episodes=tools.groups * roots, group_size=roots, record=True)
        starts = branching.turn_starts(base)
        row = (jnp.arange(tools.groups)[:, None] * roots + jnp.arange(leaves) % roots).ravel()
        later = (starts >= 0)[row].at[:, 0].set(False)
        draw = jax.random.fold_in(key, _DRAW)
        if rule == "uniform":
            turn = _pick(later, jax.random.uniform(draw, row.shape))
        else:
            change = _entropy_change(base, starts, tools)[row]
            score = selection.branch_score(jax.random.uniform(draw, later.shape), change, alpha=hyper["branch_alpha"])
            turn = jnp.argmax(later & (score <= hyper["branch_threshold"]), axis=1)
        return memory, _grow(tools, key, base, row, starts[row, turn])

    numbers = {"branch_alpha": 0.2, "branch_threshold": 0.5} if rule == "entropy" else {}
    return Part("tree", collect=collect, hyper=numbers, needs=_ONE_ROW | {"group"})


def _pick(which: Array, draw: Array) -> Array:
    """A true element of every row by ``draw`` in [0, 1): ``bool[M, K], [M] -> int32[M]``; 0 where there is none."""
    rank = jnp.cumsum(which, axis=1) - 1
    count = rank[:, -1] + 1
    chosen = jnp.minimum(jnp.floor(draw * count), count - 1)
    return jnp.argmax(which & (rank == chosen[:, None]), axis=1)


def _entropy_change(traj: Trajectory, starts: Array, tools: Tools) -> Array:
    """Normalised entropy of the first tokens of every turn minus that of the first turn: ``[B, K]``, 0 where none."""
    entropy = tools.score(scoring.View(), scoring.as_batch(traj)).entropy
    index = jnp.arange(traj.tokens.shape[1])
    head = (traj.turn[:, None] == jnp.arange(starts.shape[1])[:, None]) & traj.mask[:, None]
    head &= index < starts[..., None] + _HEAD
    count = jnp.maximum(jnp.sum(head, axis=2), 1)
    mean = masked_sum(entropy[:, None], head, 2) / count / math.log(tools.codec.vocab_size)
    return jnp.where(starts >= 0, mean - mean[:, :1], 0.0)


def _grow(tools: Tools, key: Array, base: Trajectory, row: Array, token: Array) -> Trajectory:
    """Equal groups: the rows of ``base``, then equally many branches ``(row, token)`` of each group's."""
    groups = tools.groups
    roots, leaves = base.length.shape[0] // groups, row.shape[0] // groups
    size = roots + leaves
    start = _unrecorded(branching.branch(base, row, token))
    grown = tools.roll(key, call=_BRANCHES, start=start, episodes=row.shape[0], group_size=leaves)
    parent = jnp.where(grown.parent >= 0, grown.parent // roots * size + grown.parent % roots, -1)
    inherited = jnp.sum(grown.mask, axis=1) - jnp.sum(_own(grown), axis=1)

    def weave(a: Array, b: Array) -> Array:
        parts = (x.reshape(groups, -1, *x.shape[1:]) for x in (a, b))
        return jnp.concatenate(list(parts), axis=1).reshape(groups * size, *a.shape[1:])

    traj = jax.tree.map(weave, base._replace(record=None), grown._replace(parent=parent))
    traj = traj._replace(episode=jnp.arange(groups * size, dtype=jnp.int32))
    return note(traj, inherited_tokens=weave(jnp.zeros(groups * roots), inherited.astype(jnp.float32)))


def subtrees(traj: Trajectory, depth: int = 1) -> Array:
    """Nested sub-trees of every row, for ``group_shaping.tree_relative``: ``int32[N, depth + 1]``.

    The first column is the group; in column ``j`` rows have equal ids where they share turn ``j - 1`` (the agent's
    words in it, written by one of them), -1 where they have none. Rows are those of ``tree``.
    """
    starts = branching.turn_starts(traj)[:, :depth]
    owner = group_shaping.token_owner(traj.parent, traj.branch, traj.tokens.shape[1])
    owner = jnp.take_along_axis(owner, jnp.maximum(starts, 0), axis=1)
    group = jnp.where(traj.length > 0, traj.group, -1)
    return jnp.concatenate([group[:, None], jnp.where(starts >= 0, owner, -1)], axis=1)


def tree_advantage(weight: str = "group_size", *, depth: int = 1, skip_equal: bool = False) -> Part:
    """TreePO: returns relative to the group and to the sub-trees that share up to ``depth`` turns, averaged.

    ``group_shaping.tree_relative`` on the ids of ``subtrees``: ``weight`` is "group_size" or "average". The code
    whitens the batch after it (``stages.whiten``).

    Raises:
      ValueError: ``depth`` negative or an unknown weight.

    Source: Li et al., TreePO, 2025, arXiv 2508.17445.
    """
    check_at_least(0, depth=depth)
    check_choice("weight", weight, ("group_size", "average"))

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        ret, _, played = stages.episodes(batch, tools)
        ids = subtrees(batch.traj, depth)
        adv = group_shaping.tree_relative(ret, ids, tools.episodes, weight=weight, skip_equal=skip_equal, where=played)
        return memory, batch._replace(adv=fill(adv[:, None], batch.mask)), stages.zero_variance(batch, tools)

    return Part("tree_advantage", stage, needs=_ONE_ROW | {"group"})


def shared_prefix() -> Part:
    """ARPO's hard attribution: a token that several rows share gets the mean of their advantages.

    After the stage that sets ``batch.adv`` (group-relative in the paper). Without it each row keeps its own on its copy
    of the token, and the loss averages (the soft form). Source: Dong et al., ARPO, 2025, arXiv 2507.19849.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del tools, hyper, key
        traj = batch.traj
        owner = group_shaping.token_owner(traj.parent, traj.branch, traj.tokens.shape[1])

        def column(adv: Array, owner: Array, mask: Array) -> Array:
            return group_shaping.shared_prefix_mean(adv, owner[:, None], mask[:, None])[:, 0]

        adv = jax.vmap(column, in_axes=1, out_axes=1)(batch.adv, owner, batch.mask)
        return memory, batch._replace(adv=fill(adv, batch.mask)), {}

    return Part("shared_prefix", stage, needs=_ONE_ROW)


def step_pairs() -> Part:
    """Step-DPO's data, on the agent's own trajectories: pairs with a shared history that differ from one turn on.

    Collects: of every group one episode is rolled, one of its turns is drawn uniformly, and the other ``G - 1`` rows
    continue from its beginning, so all ``G`` share what lies before. Stage: the best return of a group against its
    worst (``stages.best_against_worst``: ``[P, 2, 1, T]``, ties dropped), with the tokens of that one turn alone as the
    mask (``preference.segment_mask``). In the paper a step is chosen where the first error lies, and corrected; here
    returns of what followed tell the better step. The metric ``inherited_tokens`` is that of ``tree``.

    Source: Lai et al., Step-DPO, 2024, arXiv 2406.18629 (beta .4 to .5).
    """
    return _late_pairs("step_pairs", lambda step, traj: step)


def segment_pairs(*, segment_turns: int | None = 3) -> Part:
    """SDPO's data, on the agent's own trajectories: pairs of segments of equally many turns, behind a shared history.

    Rows and pairs are those of ``step_pairs``; the mask is that of the turn where they part and of those after it, as
    many in both: up to the end of the shorter one, and ``segment_turns`` at most (None: no limit). With ``dpo`` on sums
    over it, ``-log sigmoid(beta sum_k (log-ratio of the chosen's turn k - of the rejected's))``, the partition
    functions cancel, since the segments begin in one state and are equally long. In the paper a language model finds
    the turn where an episode goes wrong and chooses the segment (of 3 turns in most pairs); here the turn is drawn, and
    returns of what followed tell the better segment.

    Raises:
      ValueError: ``segment_turns`` below 1.

    Source: Kong et al., SDPO: Segment-Level Direct Preference Optimization, 2025, arXiv 2501.01821.
    """
    check_at_least(1, segment_turns=segment_turns)

    def end(step: Array, traj: Trajectory) -> Array:
        turns = jnp.max(jnp.where(traj.mask, traj.turn, -1), axis=-1)
        last = jnp.min(turns, axis=(1, 2))[:, None, None]
        return last if segment_turns is None else jnp.minimum(last, step + (segment_turns - 1))

    return _late_pairs("segment_pairs", end)


def _late_pairs(name: str, end: Callable[[Array, Trajectory], Array]) -> Part:
    """Pairs that part at a drawn turn, and the tokens from there to the turn ``end(turn, rows of the pairs)``."""

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        base = tools.roll(key, call=_MAIN, episodes=tools.groups, group_size=1, record=True)
        starts = branching.turn_starts(base)
        turn = _pick(starts >= 0, jax.random.uniform(jax.random.fold_in(key, _DRAW), starts.shape[:1]))
        row = jnp.repeat(jnp.arange(tools.groups), tools.group_size - 1)
        return memory, _grow(tools, key, base, row, starts[row, turn[row]])

    pairs = stages.best_against_worst()

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        memory, batch, metrics = pairs(memory, batch, tools, hyper, key)
        traj = batch.traj
        begun = jnp.take_along_axis(traj.turn, jnp.maximum(traj.branch, 0)[..., None], axis=-1)[..., 0]
        # The root of a group has branched from nothing: its mate in the pair tells the turn.
        step = jnp.max(jnp.where(traj.branch >= 0, begun, -1), axis=(1, 2))[:, None, None]
        mask = preference.segment_mask(batch.mask, traj.turn, step, end(step, traj))
        return memory, batch._replace(mask=mask), metrics

    return Part(name, stage, collect, needs=_ONE_ROW | {"pairs"})
