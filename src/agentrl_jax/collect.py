"""Where episodes come from when one plain rollout is not enough: parts that decide what is rolled, and what is kept.

All sizes are static. A collector that plays in rounds does so in one loop around one rollout, which costs one
compilation however many rounds there may be; episodes that nobody asks for are inactive and cost nothing. Tokens that
were played and are not in the trajectory are noted as ``extra_tokens`` (an episode; the unit is that of the metric
``tokens``, whole streams), so that methods can be compared at equal budgets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import control, selection, stages
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.checks import check_above, check_at_least
from agentrl_jax.episodes import (
    DRAW,
    blank,
    by_group,
    equal_groups,
    fresh_tasks,
    numbered,
    play_rounds,
    returns,
    right,
    spread,
    take_episodes,
    thrown,
    total,
    varied,
    where_episodes,
)
from agentrl_jax.parts import Part, note, noted
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Start, Trajectory


def greedy_baseline() -> Part:
    """ReMax's baseline: beside the step's rollout one greedy episode a group, on the group's task.

    Its return is noted for every member as ``greedy_return`` (``subtract_baseline`` reads it), its tokens as
    ``extra_tokens``. Source: Li et al., ReMax, 2023, arXiv 2310.10505.
    """

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        traj = tools.roll(key)
        start = Start(
            task=traj.task[:: tools.segments * tools.group_size], temperature=jnp.zeros(tools.groups, jnp.float32)
        )
        greedy = tools.roll(key, call=1, start=start, episodes=tools.groups, group_size=1)
        extra = jnp.sum(greedy.length).astype(jnp.float32) / tools.episodes
        base = spread(returns(greedy, tools.segments), tools)
        return memory, note(traj, tools.segments, greedy_return=base, extra_tokens=extra)

    return Part("greedy_baseline", collect=collect)


def subtract_baseline() -> Part:
    """ReMax: ``A = R - R_greedy`` of the episode, on each of its tokens; after ``greedy_baseline``.

    ``R`` is what ``traj.reward`` adds up to, with what stages before this one put into it; the baseline is the
    environment's own. Source: Li et al., ReMax, 2023, arXiv 2310.10505.

    Raises:
      ValueError: the rollout was not collected by ``greedy_baseline``.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        if "greedy_return" not in batch.traj.steps:
            raise ValueError("subtract_baseline reads greedy_return, which greedy_baseline collects: add that part")
        ret, _, played = stages.episodes(batch, tools)
        adv = jnp.where(played, ret - noted(batch.traj, "greedy_return", tools.segments), 0.0)
        return memory, stages.broadcast(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("subtract_baseline", stage)


class _Refill(NamedTuple):
    number: Array
    traj: Trajectory
    rolled: Array


def refill(rounds: int = 3) -> Part:
    """DAPO's dynamic sampling: groups that the environment pays all alike make way for varied ones of further rolls.

    At most ``rounds`` rolls of the whole batch, each of fresh tasks; the i-th group that does not vary is replaced by
    the i-th that does. It ends when all groups vary or the rounds are used up; what does not vary then stays, with an
    advantage of 0. Notes ``rounds`` (rolls made) and ``extra_tokens``.

    DAPO collects batches until enough is there and fails beyond a limit; here the size is static and the limit ends
    it. Source: Yu et al., DAPO, 2025, arXiv 2503.14476.

    Raises:
      ValueError: ``rounds`` below 1.
    """
    check_at_least(1, rounds=rounds)

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper

        def needs(now: _Refill) -> Array:
            return (now.number < rounds) & ~jnp.all(varied(now.traj, tools))

        def play(now: _Refill) -> _Refill:
            go = needs(now)
            start = Start(active=jnp.broadcast_to(go, (tools.episodes,)))
            new = tools.roll(key, call=now.number, start=start)
            traj = _replace_groups(now.traj, new, go, now.number == 0, tools)
            return _Refill(now.number + go, traj, now.rolled + jnp.sum(new.length))

        zero = jnp.zeros((), jnp.int32)
        everyone = Start(active=jnp.ones(tools.episodes, bool))
        done = control.while_any(needs, play, _Refill(zero, blank(tools, key, everyone), zero))
        traj = numbered(done.traj, equal_groups(tools), tools.segments)
        return memory, note(traj, tools.segments, rounds=done.number, extra_tokens=thrown(traj, done.rolled, tools))

    return Part("refill", collect=collect, needs=frozenset({"group"}))


def _replace_groups(old: Trajectory, new: Trajectory, go: Array, first: Array, tools: Tools) -> Trajectory:
    """The i-th group of ``old`` that does not vary becomes the i-th of ``new`` that does; all of ``new`` at first."""
    good, needy = varied(new, tools), ~varied(old, tools)
    rank = jnp.cumsum(needy) - 1
    source = jnp.argsort(~good, stable=True)[jnp.maximum(rank, 0)]
    replace = go & (first | (needy & (rank < jnp.sum(good))))
    group = jnp.where(first, jnp.arange(tools.groups), source)
    index = group[:, None] * tools.group_size + jnp.arange(tools.group_size)
    moved = take_episodes(new, index.reshape(-1).astype(jnp.int32), tools.segments)
    return where_episodes(spread(replace, tools), moved, old, tools.segments)


def difficulty_rolls(
    first: float = 0.5,
    *,
    max_rolls: int | None = None,
    hardness_weighted: bool = False,
    std_normalised: bool = False,
) -> Part:
    """DARS: a share ``first`` of a group's episodes is rolled; the rest of the batch goes to the groups that need it.

    Every group gets ``round(first * group_size)`` episodes, at least 1. ``selection.extra_rolls`` of its accuracy says
    how many more it should have, and the ``N - groups * first`` that are left are dealt to the hardest groups first,
    until there are no more; episodes that nobody needs are not played. The groups are **unequal**: ids are dense, rows
    sorted by group, in it by stage, and last those not played (length 0), in the group they would have belonged to.

    Args:
      first: share of the group in the first stage, so that at least one episode is left.
      max_rolls: of a group, both stages together (32 and 64 in the scripts); None: as many as there are.
      hardness_weighted, std_normalised: as in ``selection.extra_rolls``.

    The paper gives every group what it asks for, so that batches grow; here the number of episodes is that of the
    step. Source: Yang et al., Depth-Breadth Synergy in RLVR, 2025, arXiv 2508.13755.

    Raises:
      ValueError: ``first`` outside (0, 1), ``max_rolls`` below 1, groups too small for two stages.
    """
    if not 0.0 < first < 1.0:
        raise ValueError(f"first must be a share of the group in (0, 1), got {first}")
    check_at_least(1, **({} if max_rolls is None else {"max_rolls": max_rolls}))

    def init(key: Array, shape: Shape) -> PyTree:
        del key
        if not _first_rolls(first, shape.group_size) < shape.group_size:
            raise ValueError(f"first = {first} leaves nothing of a group of {shape.group_size} for the second stage")
        return ()

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        rolls = _first_rolls(first, tools.group_size)
        early = jnp.arange(tools.episodes) % tools.group_size < rolls
        own, tasks = equal_groups(tools), fresh_tasks(key, tools)
        ceiling = max(rolls, tools.episodes if max_rolls is None else max_rolls)

        def plan(number: Array, traj: Trajectory, state: PyTree) -> tuple[Array, Start, PyTree]:
            accuracy = jnp.mean(by_group(right(traj, tools.segments), tools)[:, :rolls], axis=1)
            more = selection.extra_rolls(
                accuracy, rolls, max_rolls=ceiling, hardness_weighted=hardness_weighted, std_normalised=std_normalised
            )
            dealt, group = _deal(accuracy, more, ~early, own)
            later = number > 0
            group = jnp.where(later, group, own)
            active = jnp.where(later, dealt & (number == 1), early)
            return active, Start(task=tasks[group * tools.group_size], group=group), state

        done = play_rounds(tools, key, plan, (), 2)
        group = done.traj.group[:: tools.segments]
        unplayed = done.traj.length[:: tools.segments] == 0
        stage = jnp.where(unplayed, 2, jnp.where(early, 0, 1))
        order = jnp.argsort(group * 3 + stage, stable=True).astype(jnp.int32)
        return memory, numbered(take_episodes(done.traj, order, tools.segments), group[order], tools.segments)

    return Part("difficulty_rolls", collect=collect, needs=frozenset({"group"}), init=init)


def _first_rolls(first: float, group_size: int) -> int:
    return max(1, round(first * group_size))


def _deal(accuracy: Array, more: Array, free: Array, own: Array) -> tuple[Array, Array]:
    """Deals the ``free`` episodes to the hardest groups first: ``(bool[N] played, int32[N] group)``."""
    order = jnp.argsort(accuracy, stable=True)
    upto = jnp.cumsum(more[order])
    rank = jnp.cumsum(free) - 1
    dealt = free & (rank < upto[-1])
    place = jnp.minimum(jnp.searchsorted(upto, rank, side="right"), order.shape[0] - 1)
    return dealt, jnp.where(dealt, order[place], own).astype(jnp.int32)


def resample_correct(oversample: int = 2, *, draw: bool = True, min_failed: int = 0, min_correct: int = 0) -> Part:
    """GRPO-RoC: groups ``oversample`` times as large are rolled, and the tidiest of their correct episodes stay.

    ``selection.resample_on_correct`` keeps the group's size: failures as they come, correct ones by
    ``selection.call_penalty`` of the episode's tool calls, malformed actions, answers and turns. With ``draw`` both are
    drawn at random, as in the paper; without, the least penalty stays, as in the released code. Notes
    ``extra_tokens``. Source: Shang et al., rStar2-Agent, 2025, arXiv 2508.20722.

    Raises:
      ValueError: ``oversample`` below 2, ``min_failed + min_correct`` above the group's size.
    """
    check_at_least(2, oversample=oversample)
    check_at_least(0, min_failed=min_failed, min_correct=min_correct)

    def init(key: Array, shape: Shape) -> PyTree:
        del key
        check_at_least(min_failed + min_correct, group_size=shape.group_size)
        return ()

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        size = tools.group_size * oversample
        many = tools.roll(key, episodes=tools.episodes * oversample, group_size=size)
        counts = [total(many, x, tools.segments) for x in ("tool_calls", "malformed", "answered", "played")]
        # The environment counts as calls those that parse: all that were tried are these and the malformed ones.
        counts[0] = counts[0] + counts[1]
        penalty = selection.call_penalty(*counts)
        kept = selection.resample_on_correct(
            right(many, tools.segments), penalty, many.group[:: tools.segments], tools.groups,
            jax.random.fold_in(key, DRAW) if draw else None,
            keep=tools.group_size, min_failed=min_failed, min_correct=min_correct,
        )  # fmt: skip
        mates = jnp.argsort(~by_group(kept, tools), axis=1, stable=True)[:, : tools.group_size]
        index = (jnp.arange(tools.groups)[:, None] * size + mates).reshape(-1).astype(jnp.int32)
        traj = numbered(take_episodes(many, index, tools.segments), equal_groups(tools), tools.segments)
        return memory, note(traj, tools.segments, extra_tokens=thrown(traj, jnp.sum(many.length), tools))

    needs = frozenset({"group", "parts:tool_calls", "parts:malformed", "parts:answered"})
    return Part("resample_correct", collect=collect, needs=needs, init=init)


def hints(rounds: int = 3) -> Part:
    """GHPO: a group all of whose episodes are wrong is rolled again, with the expert writing its first turns.

    The expert writes ``ceil(f * turns)`` of the turns that it takes itself, but never all of them, for ``f`` = 1/4,
    1/2, 3/4 (``selection.hint_fraction``), until a member is right or ``rounds`` further rolls were made; each replaces
    the one before. Its tokens are no sampled ones and so not in the loss. Begins with step ``hyper["hint_from"]``.
    Notes ``hint`` (the share last shown), ``rounds`` (rolls made) and ``extra_tokens``; the expert's own episodes,
    which only tell how long a solution is, are not counted.

    The paper shows the first characters of a reference solution in the prompt; here a hint is whole turns of the
    expert's, in their own place. A task that the expert solves in one turn has no part to show, and is left alone.
    Source: Liu et al., GHPO, 2025, arXiv 2507.10628.

    Raises:
      ValueError: ``rounds`` below 1.
    """
    check_at_least(1, rounds=rounds)

    def init(key: Array, shape: Shape) -> PyTree:
        del key, shape
        return jnp.zeros((), jnp.int32)

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        tasks, begun = fresh_tasks(key, tools), memory >= hyper["hint_from"]
        turns = _expert_turns(tools, key, tasks, begun, rounds + 1)

        def plan(number: Array, traj: Trajectory, shown: Array) -> tuple[Array, Start, PyTree]:
            solved = jnp.any(by_group(right(traj, tools.segments), tools), axis=1)
            hintable = begun & (turns > 1)
            shown = jnp.where(number == 0, 0.0, selection.hint_fraction(solved | ~hintable, shown))
            written = jnp.minimum(jnp.ceil(shown * turns - 1e-4), turns - 1).astype(jnp.int32)
            active = (number == 0) | (~solved & hintable)
            return spread(active, tools), Start(task=tasks, teacher_turns=spread(written, tools)), shown

        done = play_rounds(tools, key, plan, jnp.zeros(tools.groups, jnp.float32), rounds + 1)
        extra = thrown(done.traj, done.rolled, tools)
        shown = spread(done.state, tools)
        return memory + 1, note(done.traj, tools.segments, hint=shown, rounds=done.number, extra_tokens=extra)

    return Part("hints", collect=collect, hyper={"hint_from": 0.0}, needs=frozenset({"expert"}), init=init)


def _expert_turns(tools: Tools, key: Array, tasks: Array, begun: Array, call: int) -> Array:
    """Turns in which the expert itself ends each group's task, ``int32[groups]``; 0 where it does not play."""
    start = Start(task=tasks[:: tools.group_size], active=jnp.broadcast_to(begun, (tools.groups,)))
    shown = tools.roll(key, call=call, start=start, expert=True, episodes=tools.groups, group_size=1)
    return total(shown, "played", tools.segments).astype(jnp.int32)


def mixed_expert(experts: int = 1) -> Part:
    """The last ``experts`` episodes of every group are the expert's, the others the policy's: LUFFY, CHORD, RL-PLUS.

    All of a group play the same task, and the expert's returns count in the group's statistics as any other. Its
    tokens have ``traj.expert`` set and a ``logp`` of 0; they enter the loss only where the algorithm counts them.
    Sources: Yan et al., LUFFY, 2025, arXiv 2504.14945; Zhang et al., CHORD, 2025, arXiv 2508.11408.

    Raises:
      ValueError: ``experts`` below 1, or no episode of a group left to the policy.
    """
    check_above(0, experts=experts)

    def init(key: Array, shape: Shape) -> PyTree:
        del key
        if experts >= shape.group_size:
            raise ValueError(f"experts must leave the policy an episode of every {shape.group_size}, got {experts}")
        return ()

    def collect(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
        del hyper
        place = jnp.arange(tools.episodes) % tools.group_size
        turns = jnp.where(place >= tools.group_size - experts, tools.max_turns, 0).astype(jnp.int32)
        return memory, tools.roll(key, start=Start(teacher_turns=turns))

    return Part("mixed_expert", collect=collect, needs=frozenset({"expert", "group"}), init=init)
