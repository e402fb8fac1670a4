"""What is paid besides the environment's reward, and where it stands."""

import numpy as np
import pytest
from conversations import T, conversations, joined, run, split, tools_of

from agentrl_jax import rewards

EVERY = ("soft_overlong", "malformed_penalty", "step_reward", "posterior_reward", "kl_penalty", "running_scale")


def added(b, name, **hyper):
    out, _ = run(getattr(rewards, name)(), b, **hyper)
    return np.asarray(out.traj.reward) - np.asarray(b.traj.reward)


def last_written(b):
    return np.asarray([np.flatnonzero(row)[-1] for row in np.asarray(b.mask)])


def total(b, name):
    return np.asarray(b.traj.steps[name]).sum(1)


@pytest.mark.parametrize("name", EVERY)
def test_a_restarted_episode_is_paid_as_the_whole_one(name):
    b = conversations(1)
    whole, _ = run(getattr(rewards, name)(), b)
    halves, _ = run(getattr(rewards, name)(), split(b), segments=2)
    if name == "soft_overlong":  # The limit is on a row, and the rows of one episode are shorter than it is.
        assert (np.asarray(whole.traj.reward) != np.asarray(b.traj.reward)).any()
        return
    np.testing.assert_allclose(joined(halves.traj.reward), whole.traj.reward, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_rewards_stand_on_written_tokens(name):
    b = conversations(2)
    assert not added(b, name)[~np.asarray(b.mask)].any()


def test_long_answers_pay():
    b = conversations(3)
    more = added(b, "soft_overlong", overlong_buffer=12, overlong_coef=2.0)
    expected = 2.0 * np.clip((T - 12 - np.asarray(b.traj.length)) / 12, -1, 0)
    np.testing.assert_allclose(more.sum(1), expected, atol=1e-6)
    np.testing.assert_allclose(more[np.arange(8), last_written(b)], expected, atol=1e-6)


def test_actions_that_cannot_be_read_pay_where_they_end():
    b = conversations(4)
    more = added(b, "malformed_penalty", malformed_coef=0.3)
    bad = np.asarray(b.traj.steps["malformed"])
    for i in range(8):
        for k in range(bad.shape[1]):
            at = np.flatnonzero(np.asarray(b.mask)[i] & (np.asarray(b.traj.turn)[i] == k))
            if len(at):
                np.testing.assert_allclose(more[i, at[-1]], -0.3 * bad[i, k], atol=1e-6)
    np.testing.assert_allclose(more.sum(1), -0.3 * bad.sum(1), atol=1e-6)


def test_dense_rewards_are_the_cards():
    b = conversations(5)
    turns = np.asarray(b.traj.steps["played"]).sum(1)
    share = (total(b, "tool_calls") / np.maximum(turns - 1, 1)).clip(0, 1)
    expected = 0.1 * share + total(b, "answered").clip(0, 1)
    np.testing.assert_allclose(added(b, "step_reward").sum(1), expected, atol=1e-6)
    ret = np.asarray(b.traj.reward).sum(1)
    expected = total(b, "answered").clip(0, 1) + ret * total(b, "tool_calls").clip(0, 1)
    np.testing.assert_allclose(added(b, "posterior_reward").sum(1), expected, atol=1e-6)


def test_rewards_are_divided_by_the_deviation_of_all_returns_so_far():
    part, memory, seen = rewards.running_scale(), None, []
    for seed in (7, 8, 9):
        b = conversations(seed)
        memory = part.init(None, None) if memory is None else memory
        memory, out, _ = part.stage(memory, b, tools_of(b), {}, None)
        seen += list(np.asarray(b.traj.reward).sum(1))
        expected = np.asarray(b.traj.reward) / (np.std(seen, ddof=1) + 1e-8)
        np.testing.assert_allclose(out.traj.reward, expected, rtol=1e-5)
    # A return that is not a number spoils its own episode and no later one; nothing played is no return of 0.
    bad = b._replace(traj=b.traj._replace(reward=b.traj.reward.at[0, 0].set(np.nan)))
    after, out, _ = part.stage(memory, bad, tools_of(b), {}, None)
    assert np.isfinite(np.asarray(out.traj.reward)[1:]).all() and float(after.count) == 31
    gone = b._replace(traj=b.traj._replace(length=b.traj.length * 0))
    assert float(part.stage(memory, gone, tools_of(b), {}, None)[0].count) == 24


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 1 / 3, 0.7])
def test_equal_returns_are_paid_as_they_are(value):
    """Also where the mean of so many is rounded, and where turns add up to them in several ways."""
    b, part = conversations(10, groups=(0,) * 7), rewards.running_scale()
    reward = np.zeros(b.mask.shape, np.float32)
    reward[np.arange(7), last_written(b)] = value
    several = reward.copy()
    for i, at in enumerate(last_written(b)):
        first = np.flatnonzero(np.asarray(b.mask)[i])[0]
        several[i, at] -= np.float32(0.1 * i)
        several[i, first] += np.float32(0.1 * i)
    for paid in (reward, several):
        memory = part.init(None, None)
        for _ in range(3):
            alike = b._replace(traj=b.traj._replace(reward=paid))
            memory, out, _ = part.stage(memory, alike, tools_of(b), {}, None)
            np.testing.assert_array_equal(out.traj.reward, paid)


def test_an_episode_that_wrote_nothing_is_paid_nothing():
    b = conversations(6)
    traj = b.traj._replace(mask=b.traj.mask.at[0].set(False), length=b.traj.length.at[0].set(0))
    more = (
        rewards.add_episode_reward(b._replace(traj=traj), np.ones(8, np.float32), tools_of(b)).traj.reward - traj.reward
    )
    np.testing.assert_allclose(np.asarray(more).sum(1), [0] + [1] * 7, atol=1e-6)


def test_choices_are_refused_by_name():
    with pytest.raises(ValueError, match="Unknown kl_estimator 'k7'"):
        rewards.kl_penalty(kl_estimator="k7")
