"""Histories of a pool of tasks: what is remembered, what is left out, and when it comes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lent import collector, numbers, shape, together_as_alone, well_formed
from tiny import biased

from agentrl_jax import envs, history
from agentrl_jax.algorithm import Shape
from agentrl_jax.parts import noted
from agentrl_jax.train import TrainConfig

KEY = jax.random.key(0)
POOL = 11
ENV = envs.make("probe_observation")
CONFIG = TrainConfig(8, 2, max_tokens=10)
GROUPS = 4
ALWAYS_0, ALWAYS_1, EITHER = biased(b"0", 40.0), biased(b"1", 40.0), biased(b"01", 40.0)
PARTS = {"skip": history.skip_settled(POOL), "drop": history.drop_solved(POOL)}


@functools.cache
def compiled(name):
    return jax.jit(collector(PARTS[name], ENV, CONFIG))


def begin(name):
    return PARTS[name].init(KEY, shape(ENV, CONFIG))


def run(name, memory, params, key, **changed):
    memory, traj = compiled(name)(memory, params, key, numbers(PARTS[name], **changed))
    well_formed(traj, CONFIG)
    return memory, jax.tree.map(np.asarray, traj)


def tasks(traj):
    return traj.task[:: CONFIG.group_size]


def digits():
    """What each task of the pool shows: seen by playing all of them."""
    memory, shown = begin("drop"), np.full(POOL, -1)
    for i in range(3):
        memory, traj = run("drop", memory, ALWAYS_0, jax.random.key(i))
        shown[traj.task] = traj.tokens[:, 2] & 1
    return shown


def outcome(traj):
    """``(all equal, all right)`` of every group."""
    ret = traj.reward.sum(1).reshape(GROUPS, -1)
    return ret.max(1) == ret.min(1), ret.min(1) == 1


# GRESO


def test_streaks_kinds_and_bases_follow_the_slow_rule():
    memory = begin("skip")
    streak, easy, base = np.zeros(POOL, int), np.zeros(POOL, bool), {True: 0.5, False: 0.5}
    for i, params in enumerate([ALWAYS_0, ALWAYS_0, EITHER, ALWAYS_1, EITHER, ALWAYS_0]):
        memory, traj = run("skip", memory, params, jax.random.key(i))
        assert len(set(tasks(traj))) == GROUPS and np.all((traj.task >= 0) & (traj.task < POOL))
        equal, right = outcome(traj)
        for task, e, r in zip(tasks(traj), equal, right, strict=True):
            streak[task] = streak[task] + 1 if e else 0
            easy[task] = r
        for kind, part in ((True, 1 / 3), (False, 2 / 3)):
            share = np.mean(equal & (right == kind))
            base[kind] = np.clip(base[kind] + (-0.01 if share >= 0.25 * part else 0.01), 0.05, 0.95)
        np.testing.assert_array_equal(memory.streak, streak)
        np.testing.assert_array_equal(memory.easy, easy)
        np.testing.assert_allclose(
            [float(memory.base_easy), float(memory.base_hard)], [base[True], base[False]], atol=1e-6
        )
    assert streak.max() > 1 and compiled("skip")._cache_size() == 1


def test_settled_tasks_are_rolled_only_where_too_few_others_were_drawn():
    """Without a floor a long streak is always skipped: 8 of 11 tasks are drawn, so 5 settled ones leave 3 to 6."""
    settled = np.arange(POOL) % 2 == 1
    memory = begin("skip")._replace(streak=jnp.asarray(np.where(settled, 200, 0), jnp.int32))
    for seed in range(5):
        _, traj = run("skip", memory, EITHER, jax.random.key(seed), skip_floor=0.0)
        drawn = np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.key(seed), history.DRAW), POOL)[:8])
        fresh = [t for t in drawn if not settled[t]]
        want = (fresh + [t for t in drawn if settled[t]])[:GROUPS]
        np.testing.assert_array_equal(tasks(traj), want)
        np.testing.assert_allclose(noted(traj, "skipped"), np.mean(settled[drawn]))


def test_kinds_are_skipped_by_their_own_base():
    """A base of 1 never skips, one of 0 always does (up to the floor)."""
    easy = np.arange(POOL) < 6
    memory = begin("skip")._replace(
        streak=jnp.full(POOL, 3, jnp.int32), easy=jnp.asarray(easy), base_easy=jnp.float32(1), base_hard=jnp.float32(0)
    )
    counts = np.zeros(POOL)
    for seed in range(6):
        drawn, skip = history._candidates(memory, 8, {"skip_floor": jnp.float32(0)}, jax.random.key(seed))
        np.testing.assert_array_equal(skip, ~easy[np.asarray(drawn)])
        assert len(set(np.asarray(drawn).tolist())) == 8
        counts[np.asarray(drawn)] += 1
    assert counts.min() > 0


# SRPO


def test_solved_tasks_are_left_out_of_the_next_epoch_and_wrong_ones_stay():
    shown, memory = digits(), begin("drop")
    assert 2 <= shown.sum() <= POOL - 2
    seen = []
    for i in range(3):  # An epoch of 11 tasks: three steps of four, the last filled up with its first.
        assert memory.count == POOL and memory.cursor == 4 * i
        memory, traj = run("drop", memory, ALWAYS_1, jax.random.key(i))
        assert np.all(noted(traj, "in_epoch") == 1.0)
        seen += tasks(traj).tolist()
    assert sorted(seen[:POOL]) == list(range(POOL)) and seen[POOL:] == seen[: 12 - POOL]
    hard = np.flatnonzero(shown == 0)
    np.testing.assert_array_equal(memory.solved, shown == 1)
    for epoch in range(2):  # All wrong twice: they stay.
        seen, count = [], len(hard)
        assert memory.count == count and memory.cursor == 0
        for i in range(-(-count // GROUPS)):
            memory, traj = run("drop", memory, ALWAYS_1, jax.random.key(10 + 5 * epoch + i))
            np.testing.assert_allclose(noted(traj, "in_epoch"), count / POOL, rtol=1e-6)
            seen += tasks(traj).tolist()
        assert sorted(seen[:count]) == hard.tolist() and set(seen) <= set(hard)
    while memory.count < POOL:  # Now they are solved too, and all of the pool returns.
        memory, traj = run("drop", memory, ALWAYS_0, jax.random.key(int(memory.cursor) + 30))
        assert np.all(shown[tasks(traj)] == 0)
    assert not memory.solved.any() and memory.cursor == 0 and sorted(np.asarray(memory.order)) == list(range(POOL))
    assert compiled("drop")._cache_size() == 1


VISITS = st.lists(st.tuples(st.integers(0, POOL - 1), st.booleans()), min_size=4, max_size=4)


@functools.cache
def advance():
    return jax.jit(history._advance)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**POOL - 1), VISITS, st.integers(0, POOL - 1), st.integers(0, 10**6))
def test_an_epoch_advances_by_the_slow_rule(bits, visits, cursor, seed):
    solved = ((bits >> np.arange(POOL)) & 1).astype(bool)
    memory = history._new_epoch(jnp.asarray(solved), jax.random.key(seed))
    count = int(memory.count)
    kept = np.asarray(memory.order)[:count]
    assert count == (POOL if solved.all() else np.sum(~solved)) and sorted(np.asarray(memory.order)) == list(
        range(POOL)
    )
    assert set(kept) == (set(range(POOL)) if solved.all() else set(np.flatnonzero(~solved)))
    task, right = map(np.asarray, zip(*visits, strict=True))
    after = advance()(memory._replace(cursor=jnp.int32(cursor)), task, right, jax.random.key(seed + 1))
    want = np.asarray(memory.solved).copy()
    for t in set(task.tolist()):
        want[t] = np.all(right[task == t])
    over = cursor + 4 >= count
    np.testing.assert_array_equal(after.solved, want & ~(over & want.all()))
    assert after.cursor == (0 if over else cursor + 4)
    if not over:
        np.testing.assert_array_equal(after.order, memory.order)
    else:
        assert after.count == (POOL if want.all() else np.sum(~want))


# Both


@pytest.mark.parametrize("name", PARTS)
def test_seeds_together_equal_seeds_alone_and_memory_keeps_its_types(name):
    trajs = together_as_alone(PARTS[name], CONFIG)
    assert len({tuple(task) for task in trajs.task.tolist()}) > 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: history.skip_settled(0), "pool must be at least 1, got 0"),
        (lambda: history.skip_settled(9, 0), "oversample must be at least 1, got 0"),
        (lambda: history.skip_settled(7).init(KEY, Shape(8, 2, 10, 1)), "the 8 tasks that a step draws .* got 7"),
        (lambda: history.drop_solved(0), "pool must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
