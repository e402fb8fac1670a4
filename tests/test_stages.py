"""Stages: rows are not episodes, pairs, baselines, penalties in the reward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch, masks, tools, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CODEC, POLICY, params

from agentrl_jax import algorithms, groups, objectives, scoring, stages, update
from agentrl_jax.algorithm import Shape
from agentrl_jax.algorithms.preferences import RULES
from agentrl_jax.types import Score

KEY = jax.random.key(0)
N, T, S = 4, 10, 3
HYPER = {"discount": jnp.float32(0.9), "lambda_": jnp.float32(0.8), "kl_coef": jnp.float32(0.5)}


def apply(stage, b, with_tools, memory=()):
    return stage(memory, b, with_tools, HYPER, KEY)


def split(b, cuts):
    """Each episode's row over three rows: the parts between its cuts, each moved to the front of a row of its own."""
    traj, out = b.traj, {}
    cuts = np.asarray(cuts)
    begin = np.concatenate([np.zeros((N, 1), int), cuts], 1).ravel()
    end = np.concatenate([cuts, np.full((N, 1), T)], 1).ravel()
    index = np.minimum(begin[:, None] + np.arange(T), T - 1)
    here = np.arange(T) < (end - begin)[:, None]

    def part(x, fill=0):
        x = np.repeat(np.asarray(x), S, 0)
        return jnp.asarray(np.where(here, np.take_along_axis(x, index, 1), fill))

    mask = part(traj.mask, False)
    fresh = trajectory(mask, reward=part(traj.reward), group=np.asarray(traj.group), segments=S)
    last = np.arange(N * S) % S == S - 1
    # A context that was opened has a prompt at least, so it has a length.
    fresh = fresh._replace(
        truncated=jnp.repeat(traj.truncated, S) & last, length=jnp.maximum(fresh.length, jnp.repeat(traj.length > 0, S))
    )
    out = {k: part(getattr(b, k)) for k in ("adv", "target", "logp_old", "value")}
    extra = {k: part(v) for k, v in b.extra.items()}
    bootstrap = jnp.where(jnp.asarray(last), jnp.repeat(b.bootstrap, S), 77.0)
    return scoring.as_batch(fresh)._replace(**out, extra=extra, bootstrap=bootstrap), (begin, end)


def joined(x, cuts):
    """The parts laid end to end again, ``[N, T]``."""
    begin, end = cuts
    parts = [np.asarray(row)[: e - b] for row, b, e in zip(x, begin, end, strict=True)]
    return np.stack([np.concatenate(parts[i * S : (i + 1) * S]) for i in range(N)])


STAGES = {
    "gae": stages.gae(),
    "group": stages.group_advantage(groups.group_relative),
    "leave_one_out": stages.group_advantage(groups.leave_one_out),
    "return_to_go": stages.return_to_go("ema"),
    "whiten": stages.whiten(),
    "kl_in_reward": stages.kl_in_reward(),
}


@functools.cache
def compiled(name, segments):
    memory = (jnp.float32(0.2), jnp.float32(0.5)) if name == "return_to_go" else ()

    def run(b):
        _, out, metrics = apply(STAGES[name], b, tools(b.traj, groups=2, segments=segments), memory)
        return out.adv, out.target, out.traj.reward, metrics

    return jax.jit(run)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(sorted(STAGES)))
def test_splitting_an_episode_into_rows_changes_no_number(seed, name):
    rng = np.random.default_rng(seed)
    mask = masks((T, T - 2, 5, 7), T, seed)
    reward = np.where(mask, rng.normal(size=mask.shape), 0)
    traj = trajectory(mask, reward=reward, group=(0, 1, 1, 0), truncated=(1, 0, 1, 0))
    b = batch(traj, seed)._replace(bootstrap=jnp.asarray(rng.normal(size=N), jnp.float32))
    b_split, cuts = split(b, np.sort(rng.integers(0, T + 1, (N, S - 1)), 1))
    whole, parts = compiled(name, 1)(b), compiled(name, S)(b_split)
    for a, x in zip(whole[:3], parts[:3], strict=True):
        np.testing.assert_allclose(np.where(mask, a, 0), np.where(mask, joined(x, cuts), 0), atol=1e-5)
    jax.tree.map(lambda a, x: np.testing.assert_allclose(a, x, atol=1e-4), whole[3], parts[3])


def test_an_episode_of_three_rows_counts_once():
    """One rollout of three rows with return 1, another of one row with 0: the baseline is a half."""
    mask = np.asarray([[1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [0, 0]], bool)
    reward = np.zeros((6, 2))
    reward[2, 1] = 1
    traj = trajectory(mask, reward=reward, segments=3)
    stage = stages.group_advantage(groups.group_relative, scale="none")
    _, out, _ = apply(stage, scoring.as_batch(traj), tools(traj, segments=3))
    np.testing.assert_allclose(out.adv, np.where(mask, [[0.5]] * 3 + [[-0.5]] * 3, 0), atol=1e-6)


def test_only_an_episodes_last_row_bootstraps_and_only_when_cut():
    mask = np.ones((4, 1), bool)
    traj = trajectory(mask, segments=2, truncated=(0, 1, 0, 0))
    b = scoring.as_batch(traj)._replace(bootstrap=jnp.asarray([100.0, 2.0, 100.0, 100.0]))
    _, out, _ = apply(stages.gae(), b, tools(traj, segments=2))
    np.testing.assert_allclose(out.adv[:, 0], [0.9 * 0.8 * 1.8, 1.8, 0, 0], atol=1e-6)


def test_the_critic_may_look_further_than_the_policy():
    """Each by a lambda of its own; with the same for both, the one estimate."""
    mask = masks((T, T - 2, 5, 7), T, 3)
    traj = trajectory(mask, reward=np.where(mask, np.random.default_rng(3).normal(size=mask.shape), 0))
    b = batch(traj, 3)

    def run(**numbers):
        stage = stages.gae(decoupled="lambda_critic" in numbers)
        hyper = HYPER | {k: jnp.float32(v) for k, v in numbers.items()}
        return stage((), b, tools(traj), hyper, KEY)[1]

    plain, both, far = run(), run(lambda_critic=0.8), run(lambda_critic=1.0)
    for a, x in ((plain.adv, both.adv), (plain.target, both.target), (plain.adv, far.adv)):
        np.testing.assert_allclose(a, x, atol=1e-6)
    np.testing.assert_allclose(far.target, run(lambda_=1.0).target, atol=1e-6)
    assert np.abs(np.asarray(far.target - plain.target)).max() > 0.1


# Returns and baselines


def test_the_baseline_is_a_running_mean_of_the_past():
    algorithm = algorithms.make("reinforce")
    memory, values = algorithm.init(KEY, Shape(4, 2, 8, 2))["returns"], []
    for reward in (1.0, 1.0, 0.0):
        traj = trajectory([[0, 1, 1]] * 2, reward=[[0, 0, reward]] * 2)
        stage = stages.return_to_go("ema", decay=0.5)
        memory, out, metrics = stage(memory, scoring.as_batch(traj), tools(traj), HYPER | {"discount": 1.0}, KEY)
        values.append(float(metrics["baseline"][0]))
        np.testing.assert_allclose(out.adv[:, 1:], reward - values[-1], atol=1e-6)
        assert not out.adv[:, 0].any()
    assert values == pytest.approx([0.0, 1.0, 1.0])  # debiased, and never of the batch that it judges
    assert float(memory[0] / memory[1]) == pytest.approx((0.25 + 0.125) / 0.875)


@pytest.mark.parametrize("reward, lengths", [(np.nan, 2), (np.inf, 2), (5.0, 0)])
def test_the_baseline_forgets_nothing_for_what_is_no_return(reward, lengths):
    memory = (jnp.float32(0.3), jnp.float32(0.6))
    traj = trajectory(np.arange(2)[None] < lengths, reward=[[0, reward]])
    after, _, metrics = apply(stages.return_to_go("ema"), scoring.as_batch(traj), tools(traj), memory)
    assert after == memory and metrics["baseline"][0] == 0.5


def test_without_a_baseline_the_advantage_is_the_return_to_go():
    traj = trajectory([[0, 1, 0, 1]], reward=[[0, 1, 0, 2]])
    _, out, _ = apply(stages.return_to_go("none"), scoring.as_batch(traj), tools(traj))
    np.testing.assert_allclose(out.adv, [[0, 1 + 0.9 * 2, 0, 2]], atol=1e-6)
    with pytest.raises(ValueError, match="baseline must be 'ema' or 'none', got 'mean'"):
        stages.return_to_go("mean")


def test_groups_follow_their_ids_and_rows_not_played_do_not_count():
    mask = np.asarray([[1], [1], [1], [1], [0]], bool)
    traj = trajectory(mask, reward=[[1.0], [0], [1], [0], [0]], group=(0, 1, 0, 1, 1))
    stage = stages.group_advantage(groups.leave_one_out)
    _, out, metrics = apply(stage, scoring.as_batch(traj), tools(traj, groups=2))
    assert not out.adv.any() and metrics["zero_variance"] == (2, 2)
    traj = traj._replace(group=jnp.zeros(5, jnp.int32))
    _, out, metrics = apply(stage, scoring.as_batch(traj), tools(traj, groups=2))
    np.testing.assert_allclose(out.adv[:, 0], [2 / 3, -2 / 3, 2 / 3, -2 / 3, 0], atol=1e-6)
    assert metrics["zero_variance"] == (0, 1)


def test_a_start_may_make_more_groups_than_equal_ones():
    """Four groups of one to three where equal groups would be two: every one of them is told apart."""
    group, reward = (3, 3, 0, 0, 0, 1, 2, 2), np.asarray([[1.0], [0], [1], [0], [0], [1], [4], [4]])
    traj = trajectory(np.ones((8, 1)), reward=reward, group=group)
    stage = stages.group_advantage(groups.leave_one_out)
    _, out, metrics = apply(stage, scoring.as_batch(traj), tools(traj, groups=2))
    np.testing.assert_allclose(out.adv[:, 0], [1, -1, 1, -0.5, -0.5, 0, 0, 0], atol=1e-6)
    assert metrics["zero_variance"] == (2, 4)


def test_a_penalty_in_the_reward_hides_no_group_of_equals():
    traj = trajectory(np.ones((2, 2)), reward=[[0, 1.0]] * 2)
    shaped = traj._replace(reward=traj.reward - jnp.asarray([[0.1, 0.2], [0.3, 0.4]]))
    _, out, metrics = apply(stages.group_advantage(groups.leave_one_out), scoring.as_batch(shaped), tools(traj))
    assert metrics["zero_variance"] == (1, 1) and out.adv.any()


def test_a_group_of_equals_teaches_nothing():
    traj = trajectory(masks((T,) * 4, T), reward=np.full((4, T), 0.3) * (np.arange(T) == T - 1))
    algorithm = algorithms.make("grpo")
    hyper = {k: jnp.float32(v) for k, v in algorithm.hyper.items()}
    memory = algorithm.init(KEY, Shape(4, 4, T, 2))
    _, b, metrics = algorithm.prepare(memory, traj, tools(traj), hyper, KEY)
    score = lambda p, name, b: scoring.score(POLICY, p["policy"], scoring.View(), b)  # noqa: E731
    grads, loss, _ = jax.jit(
        lambda p, b: update.gradient(algorithm, score, p, algorithm.weigh(b, hyper, 1), hyper, single=True)
    )({"policy": params()}, b)
    assert loss == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))
    assert metrics["zero_variance"] == (1, 1)


# KL in the reward, whitening


def test_kl_in_reward():
    traj = trajectory([[0, 1, 0, 1]], reward=[[0, 0, 0, 1]])
    b = scoring.as_batch(traj)._replace(
        logp_old=jnp.asarray([[9.0, -1.0, np.nan, -2.0]]), extra={"logp_ref": jnp.asarray([[0.0, -1.5, 3.0, -1.0]])}
    )
    _, out, metrics = apply(stages.kl_in_reward(), b, tools(traj))
    np.testing.assert_allclose(out.traj.reward, [[0, -0.25, 0, 1.5]], atol=1e-6)
    np.testing.assert_allclose(metrics["kl_reward"], (-0.5, 2))
    # The expert's words are no samples of the policy: no charge, and no part of the mean.
    b = b._replace(traj=traj._replace(expert=jnp.asarray([[False, True, False, False]])))
    _, out, metrics = apply(stages.kl_in_reward(), b, tools(traj))
    np.testing.assert_allclose(out.traj.reward, [[0, 0, 0, 1.5]], atol=1e-6)
    np.testing.assert_allclose(metrics["kl_reward"], (-1.0, 1))


def test_whitening_sees_the_batch_and_not_its_parts():
    traj = trajectory([[1, 1], [1, 0]])
    b = scoring.as_batch(traj)._replace(adv=jnp.asarray([[1.0, 2.0], [3.0, np.nan]]))
    _, out, _ = apply(stages.whiten(), b, tools(traj))
    np.testing.assert_allclose(out.adv, [[-1, 0], [1, 0]], atol=1e-5)
    parts = [update.take(out, jnp.asarray([i])).adv for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), out.adv)


@pytest.mark.parametrize("value, n", [(0.1, 7), (0.3, 13), (1 / 3, 11), (0.7, 24)])
def test_equal_targets_leave_nothing_to_explain(value, n):
    """Float32 rounds the mean of so many of these values away from them."""
    guess, every = np.random.default_rng(0).normal(size=n).astype(np.float32), np.ones(n, bool)
    assert stages.explained_variance(jnp.full(n, value), jnp.asarray(guess), jnp.asarray(every)) == 0
    target = jnp.where(jnp.arange(n) < 5, value, jnp.nan).at[0].set(-1.0)
    found = stages.explained_variance(target, jnp.where(jnp.arange(n) < 5, target + 0.3, jnp.nan), jnp.arange(n) < 5)
    np.testing.assert_allclose(found, 1.0, atol=1e-5)
    assert stages.explained_variance(target, jnp.asarray(guess), ~every) == 0


def test_the_chain_counts_the_experts_tokens_only_when_told_to():
    mask = np.asarray([[0, 1, 1, 1]], bool)
    traj = trajectory(mask, expert=[[0, 1, 0, 0]])
    seen = []

    def spy(memory, b, tools, hyper, key):
        seen.append(key)
        return memory + 1, b, {"n": (jnp.float32(1), jnp.float32(1))}

    memory, b, metrics = stages.chain(spy, spy)(0, traj, tools(traj), HYPER, KEY)
    assert memory == 2 and metrics["n"] == (2, 2) and seen[0] != seen[1]
    np.testing.assert_array_equal(b.mask, [[0, 0, 1, 1]])
    np.testing.assert_array_equal(stages.chain(teacher=True)((), traj, tools(traj), HYPER, KEY)[1].mask, mask)


def test_old_values_are_scored_only_where_they_are_needed():
    traj = trajectory(np.ones((2, 3)))
    calls = []

    def scores(view, b):
        calls.append(view.model)
        return Score(*(jnp.full((2, 3), float(len(calls))),) * 3, jnp.full(2, 7.0))

    run = lambda stage, single: apply(stage, scoring.as_batch(traj), tools(traj, single=single, scores=scores))[1]  # noqa: E731
    assert not run(stages.score_policy(), True).logp_old.any() and calls == []
    b = run(stages.score_policy(), False)
    assert b.logp_old[0, 0] == 1 and b.value[0, 0] == 1 and b.bootstrap[0] == 7
    assert run(stages.score_policy(always=True), True).logp_old[0, 0] == 2
    assert run(stages.score_reference(), True).extra["logp_ref"][0, 0] == 3 and calls == ["policy"] * 2 + ["reference"]


# Pairs


def pairs(returns, group, num, played=None, segments=1, order=None):
    returns, group = np.asarray(returns, float), np.asarray(group)
    order = np.arange(len(returns)) if order is None else np.asarray(order)
    rows = np.repeat(returns[order], segments) * (np.arange(len(returns) * segments) % segments == segments - 1)
    mask = np.ones((len(rows), 2), bool)
    if played is not None:
        mask &= np.repeat(np.asarray(played, bool)[order], segments)[:, None]
    reward = np.stack([np.zeros(len(rows)), rows], 1) * mask
    traj = trajectory(mask, reward=reward, group=group[order], segments=segments)
    # The episode's name travels in the task.
    traj = traj._replace(task=jnp.repeat(jnp.asarray(order, jnp.int32), segments))
    _, b, metrics = apply(
        stages.best_against_worst(), scoring.as_batch(traj), tools(traj, groups=num, segments=segments)
    )
    return b, metrics


def chosen(b):
    return {
        tuple(x)
        for x, kept in zip(np.asarray(b.traj.task[:, :, 0]).tolist(), b.mask.any((1, 2, 3)), strict=True)
        if kept
    }


def test_pairs_are_the_best_and_the_worst_of_each_group():
    returns, group = [1, 3, 2, 5, 5, 0, 4, -1], [0, 0, 0, 1, 1, 2, 2, 2]  # groups of three, two and three
    b, metrics = pairs(returns, group, 3)
    assert b.mask.shape == (3, 2, 1, 2) and chosen(b) == {(1, 0), (6, 7)}
    assert metrics["pairs_kept"] == (2, 3) and metrics["zero_variance"] == (1, 3)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(8)
        assert chosen(pairs(returns, group, 3, order=order)[0]) == {(1, 0), (6, 7)}


def test_pairs_hold_all_rows_of_an_episode():
    b, _ = pairs([0, 1, 2, 3], [0, 1, 0, 1], 2, segments=3)
    assert b.mask.shape == (2, 2, 3, 2) and chosen(b) == {(2, 0), (3, 1)}
    np.testing.assert_array_equal(b.traj.segment, np.broadcast_to([0, 1, 2], (2, 2, 3)))
    np.testing.assert_array_equal(b.traj.episode, np.broadcast_to(np.asarray([[2, 0], [3, 1]])[..., None], (2, 2, 3)))


def test_episodes_not_played_are_in_no_pair():
    b, metrics = pairs([9, 1, 2, 7], [0, 0, 0, 1], 2, played=[0, 1, 1, 1])
    assert chosen(b) == {(2, 1)} and metrics["pairs_kept"] == (1, 2)
    b, metrics = pairs([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], 2)
    assert chosen(b) == {(1, 0), (3, 2)} and metrics["pairs_kept"] == (2, 3)  # A third group, and room for two pairs.
    none, _ = pairs([9, 1], [0, 0], 1, played=[0, 0])
    assert not none.mask.any()


def test_the_preference_loss_is_that_of_kept_pairs_alone():
    """Two kept pairs of known margins and a tie: -mean log sigmoid(beta h), masked tokens unread."""
    b, _ = pairs([0, 1, 2, 0, 4, 4], [0, 0, 1, 1, 2, 2], 3)
    b = objectives.weigh_pairs(b, {}, 1)
    logp = jnp.asarray([[-1.0, -2.0], [-3.0, -2.0], [-9.0, -9.0]])[:, :, None, None] * jnp.asarray([1.0, 0.0])
    ref = jnp.zeros_like(logp)
    b = b._replace(extra={"logp_ref": ref}, mask=b.mask & jnp.asarray([True, False]))
    logp = jnp.where(b.mask, logp, jnp.nan)
    scores = {"policy": Score(logp, jnp.zeros_like(logp), jnp.zeros_like(logp), jnp.zeros(logp.shape[:-1]))}
    hyper = {"beta": jnp.float32(0.1), "label_smoothing": jnp.float32(0.0)}
    loss, metrics = objectives.preference_objective(RULES["dpo"].loss)(scores, b, hyper)
    h = np.asarray([1.0, -1.0])
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-0.1 * h))), rtol=1e-5)
    np.testing.assert_allclose(metrics["margin"], (0.0, 2), atol=1e-6)
    assert metrics["preference_accuracy"] == (1, 2)
    slope = jax.grad(
        lambda x: objectives.preference_objective(RULES["dpo"].loss)(
            {"policy": scores["policy"]._replace(logp=x)}, b, hyper
        )[0]
    )(logp)
    sigma = 1 / (1 + np.exp(0.1 * h))
    np.testing.assert_allclose(slope[:2, :, 0, 0], np.stack([-sigma, sigma], 1) * 0.1 / 2, rtol=1e-5)
    assert not slope[2].any() and not slope[..., 1].any()


def test_codec_ids_of_made_up_rows_are_real():
    """The helper of these tests is itself held to the contract of a trajectory."""
    traj = trajectory(masks((T, 4, 0, 7), T))
    assert np.all(np.asarray(traj.tokens)[np.arange(T) >= np.asarray(traj.length)[:, None]] == CODEC.pad)
    assert np.all((traj.turn >= 0) == (traj.tokens != CODEC.pad)) and not np.any(traj.mask & (traj.turn < 0))
