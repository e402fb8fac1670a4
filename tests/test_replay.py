"""The ring buffer and the stage that replays from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import masks, tools, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from lent import at, same, stack, typed
from tiny import CODEC, POLICY, biased

from agentrl_jax import algorithms, envs, replay, scoring
from agentrl_jax.algorithm import Shape
from agentrl_jax.metrics import finalize
from agentrl_jax.train import TrainConfig, make_hyper, make_init, make_step
from agentrl_jax.types import Score
from agentrl_jax.update import UpdateConfig

KEY = jax.random.key(0)
T = 6


def made(adv, *, version=0, seed=0, temperature=1.0):
    """A batch of rows whose loss tokens have these advantages, one a row; every row tells the others apart."""
    adv = np.asarray(adv, float)
    mask = masks([T] * len(adv), T, seed)
    rng = np.random.default_rng(seed)
    logp = np.where(mask, -rng.random(mask.shape), 0)
    traj = trajectory(mask, reward=np.where(np.arange(T) == T - 1, adv[:, None], 0), logp=logp, seed=seed)
    n = len(adv)
    traj = traj._replace(
        version=jnp.full(n, version, jnp.int32),
        task=jnp.asarray(1000 * seed + np.arange(n), jnp.int32),
        temperature=jnp.full(n, temperature, jnp.float32),
    )
    adv = jnp.asarray(np.where(mask, adv[:, None], 7.0), jnp.float32)
    return scoring.as_batch(traj)._replace(adv=adv, logp_old=jnp.full((n, T), -9.0))


@functools.cache
def compiled_push():
    return jax.jit(replay.push)


# The buffer


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=5), st.sampled_from([1, 3, 8]))
def test_the_buffer_holds_the_latest_rows(pushes, capacity):
    buffer, told = replay.empty(capacity, T), []
    ring, cursor = [None] * capacity, 0
    for i, where in enumerate(pushes):
        b = made(np.arange(1, 6), seed=i + 1)
        buffer = compiled_push()(buffer, b, np.asarray(where))
        for row in np.flatnonzero(where):
            ring[cursor], cursor = (i, row), (cursor + 1) % capacity
            told.append((i, row))
    assert buffer.filled == min(len(told), capacity) and buffer.cursor == cursor
    task = [-1 if x is None else 1000 * (x[0] + 1) + x[1] for x in ring]
    np.testing.assert_array_equal(np.where(np.arange(capacity) < buffer.filled, buffer.rows.task, -1), task)
    latest = {1000 * (i + 1) + row for i, row in told[-capacity:]}
    assert {int(t) for t, x in zip(buffer.rows.task, ring, strict=True) if x is not None} == latest


def test_a_stored_row_is_whole_and_masked_advantages_are_not_read():
    b = made([1, -2, 3], version=4, temperature=0.7)
    rows = compiled_push()(replay.empty(3, T), b, np.ones(3, bool)).rows
    same(rows, replay.rows_of(b), 0)
    np.testing.assert_array_equal(rows.adv, np.where(b.mask, np.asarray([[1], [-2], [3]]), 0))
    np.testing.assert_allclose(replay.magnitude(rows), [1, 2, 3], rtol=1e-6)
    assert np.all(rows.version == 4) and np.all(rows.temperature == np.float32(0.7))


def test_rows_are_drawn_by_the_size_of_their_advantage():
    """The card: A = [1.5, -.5, .25, .75] gives chances of 1/2, 1/6, 1/12, 1/4; places never filled none."""
    b = made([1.5, -0.5, 0.25, 0.75])
    buffer = compiled_push()(replay.empty(7, T), b, np.ones(4, bool))
    drawn = jax.jit(replay.draw, static_argnums=2)(buffer, KEY, 6000)
    share = np.bincount(np.asarray(drawn.task), minlength=4) / 6000
    np.testing.assert_allclose(share, [1 / 2, 1 / 6, 1 / 12, 1 / 4], atol=0.02)
    same(jax.tree.map(lambda x: x[:50], drawn), jax.tree.map(lambda x: x[drawn.task[:50]], buffer.rows), 0)


# The stage


@functools.cache
def compiled(capacity):
    """The stage, whose models say -3 of every token; which it asks; and the stage before it is compiled."""
    asked, part = [], replay.replay(capacity)

    def scores(view, of):
        asked.append(view.model)
        return Score(*(jnp.full(of.mask.shape, -3.0),) * 3, jnp.zeros(of.mask.shape[0]))

    def run(memory, b, share, key):
        return part.stage(memory, b, tools(b.traj, scores=scores), {"replay_share": share}, key)

    return jax.jit(run), asked, run


def apply(memory, b, share, key=KEY):
    memory, out, metrics = compiled(len(memory.rows.length))[0](memory, b, jnp.float32(share), key)
    return memory, out, finalize(metrics)


def test_rows_that_teach_nothing_make_way_for_stored_ones():
    memory = replay.replay(4).init(KEY, Shape(4, 2, T, 2))
    old = made([2.0, 0.0, -1.0, 0.0], version=3, seed=1)
    memory, out, metrics = apply(memory, old, 1.0)
    assert metrics["replay_share"] == 0 and np.isnan(metrics["replay_age"])
    same(out, old, 0)
    assert memory.filled == 2 and set(np.asarray(memory.rows.task[:2]).tolist()) == {1000, 1002}

    new = made([0.0, 5.0, 0.0, 0.0], version=7, seed=2)
    memory, out, metrics = apply(memory, new, 0.5)
    assert compiled(4)[1] == [] and metrics["replay_share"] == 0.5 and metrics["replay_age"] == 4
    task = np.asarray(out.traj.task)
    assert set(task[[0, 2]].tolist()) <= {1000, 1002} and task[1] == 2001 and task[3] == 2003
    for row in (0, 2):
        source = int(task[row]) - 1000
        for name in ("tokens", "mask", "logp", "turn", "length", "version", "temperature", "reward"):
            np.testing.assert_array_equal(getattr(out.traj, name)[row], getattr(old.traj, name)[source], err_msg=name)
        np.testing.assert_array_equal(out.mask[row], old.mask[source])
        np.testing.assert_array_equal(out.adv[row], np.where(old.mask, old.adv, 0)[source])
        np.testing.assert_array_equal(out.logp_old[row], old.traj.logp[source])
        assert not out.traj.steps["played"][row].any()
    for row in (1, 3):
        assert np.all(out.logp_old[row] == -9)
        np.testing.assert_array_equal(out.traj.tokens[row], new.traj.tokens[row])
    np.testing.assert_array_equal(out.traj.group, new.traj.group)
    np.testing.assert_array_equal(out.traj.episode, new.traj.episode)
    assert memory.filled == 3 and memory.rows.task[2] == 2001, "replayed rows are not stored again"


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from([0.0, 1.0, np.nan]), min_size=4, max_size=4), st.floats(0, 1))
def test_never_more_than_the_share_and_only_idle_rows(adv, share):
    memory, _, _ = apply(replay.empty(6, T), made([1.0, 2.0], seed=3), 1.0)
    after, out, metrics = apply(memory, made(adv, seed=4), share)
    idle = np.asarray([a == 0 for a in adv])
    changed = np.asarray(out.traj.task) < 4000
    assert not np.any(changed & ~idle) and changed.sum() == min(idle.sum(), int(share * 4 + 1e-4))
    np.testing.assert_array_equal(np.flatnonzero(changed), np.flatnonzero(idle)[: changed.sum()])
    assert after.filled == 2 + sum(a == 1 for a in adv), "what is not finite is never stored"
    assert metrics["replay_share"] == pytest.approx(changed.mean())


def test_rows_that_were_not_played_are_replaced_too():
    memory = apply(replay.empty(6, T), made([1.0, np.nan], seed=3), 1.0)[0]
    b = made([1.0, 1.0], seed=4)
    nothing = trajectory(np.zeros((1, T)))
    put = lambda x, y: x.at[1].set(y[0])  # noqa: E731
    b = b._replace(traj=jax.tree.map(put, b.traj, nothing), mask=b.mask.at[1].set(False))
    _, out, _ = apply(memory, b, 1.0)
    assert out.traj.task.tolist() == [4000, 3000] and out.traj.length[1] == T and out.mask[1].any()


def test_what_other_stages_said_of_a_row_does_not_pass_to_the_one_in_its_place():
    grid = jnp.full((2, T), 0.3)
    extra = {"importance": grid, "held": grid > 0, "correct": grid > 0, "entropy": grid, "logp_ref": grid}
    memory = apply(replay.empty(6, T), made([1.0, 2.0], seed=3), 1.0)[0]
    b = made([1.0, 0.0], seed=4)._replace(extra=extra)
    _, out, _ = apply(memory, b, 1.0)
    for name, value in (("importance", 1), ("held", 0), ("correct", 0), ("entropy", 0)):
        np.testing.assert_array_equal(out.extra[name][0], extra[name][0])
        assert np.all(out.extra[name][1] == value) and out.extra[name].dtype == extra[name].dtype
    assert np.all(out.extra["logp_ref"] == -3) and set(compiled(6)[1]) == {"reference"}
    with pytest.raises(ValueError, match=r"cannot tell \['logp_masked'\]"):
        apply(memory, b._replace(extra={"logp_masked": grid}), 1.0)


def test_seeds_together_equal_seeds_alone_and_memory_keeps_its_types():
    memory, batches = replay.empty(6, T), [made([1.0, -2.0, 0, 0], seed=5), made([0, 0.0, 4.0, 0], seed=6)]
    memories = stack(memory, apply(memory, batches[1], 1.0)[0])
    keys, share = jax.random.split(KEY, 2), jnp.float32(0.5)
    together = jax.jit(jax.vmap(compiled(6)[2], (0, 0, None, 0)))(memories, stack(*batches), share, keys)
    for i in range(2):
        alone = compiled(6)[0](at(memories, i), batches[i], share, keys[i])
        same(at(together, i), alone)
        assert typed(alone[0]) == typed(memory)


# In a step


@functools.cache
def algorithm():
    return algorithms.compose(replay="replay", capacity=8)


@functools.cache
def step():
    env, config = envs.make("probe_observation"), TrainConfig(8, 2, max_tokens=10, update=UpdateConfig(optimizer="sgd"))
    fns = make_init(POLICY, CODEC, env, algorithm(), config), make_step(POLICY, CODEC, env, algorithm(), config)
    return tuple(jax.jit(f) for f in fns)


def test_a_step_with_replay_trains_on_rows_of_earlier_policies():
    init, advance = step()
    hyper = make_hyper(algorithm(), envs.make("probe_observation"), learning_rate=0.1, replay_share=1.0)
    state = init(KEY, hyper, biased(b"01", 6.0))
    filled, ages, shares = [], [], []
    for _ in range(5):
        state, metrics = advance(state)
        metrics = finalize(metrics)
        filled.append(int(state.memory["replay"].filled))
        ages.append(float(metrics["replay_age"]))
        shares.append(float(metrics["replay_share"]))
        assert np.isfinite(metrics["grad_norm"]) and int(state.skipped) == 0
    assert shares[0] == 0 and max(shares) > 0 and filled == sorted(filled) and filled[-1] == 8
    # With all idle rows replaced every row teaches: what is stored, its own included, has an advantage.
    assert all(age >= 1 for age, share in zip(ages, shares, strict=True) if share > 0)
    rows = state.memory["replay"].rows
    assert np.all(replay.magnitude(rows) > 0) and advance._cache_size() == 1
    scored = jax.jit(
        lambda p, t: scoring.token_scores(POLICY, p, t, jnp.ones(8), allowed=jnp.asarray(CODEC.sampleable))
    )
    logp = np.where(rows.written, scored(state.params["policy"], rows.tokens)[0], 0)
    assert np.max(np.abs(logp - rows.logp)) > 1e-4, "stored log-probabilities are of the policy that sampled"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: replay.replay(0), "capacity must be at least 1, got 0"),
        (lambda: replay.replay(4, 1.5), r"share must be in \[0, 1\], got 1.5"),
        (lambda: replay.empty(4, 0), "max_tokens must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
