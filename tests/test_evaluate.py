"""Evaluation: a greedy column and sampled ones, over problems that share their tasks."""

import functools

import jax
import numpy as np
import pytest
from batches import trajectory
from rollout_oracle import Talk, talk
from tiny import CODEC, POLICY, biased

from agentrl_jax import envs, make_evaluate
from agentrl_jax.envs import canonical_params
from agentrl_jax.evaluate import summarize
from agentrl_jax.metrics import finalize
from agentrl_jax.train import rollout_metrics

P, K = 5, 3


@functools.cache
def evaluate():
    return jax.jit(make_evaluate(POLICY, CODEC, talk(), problems=P, samples=K, max_tokens=40, slots=6, segments=2))


def run(seed=0, temperature=1.0, **env_params):
    p = biased(b"abc", 2.0, 5.0)
    out = evaluate()(p, jax.random.key(seed), canonical_params(Talk(**env_params)), temperature)
    return jax.tree.map(np.asarray, out)


def test_columns():
    out = run()
    traj = out.trajectory
    assert out.success.shape == out.reward.shape == out.turns.shape == (P, 1 + K)
    heat = traj.temperature.reshape(P, 1 + K, 2)
    assert np.all(heat[:, 0] == 0) and np.all(heat[:, 1:] == 1)
    task, prompt = traj.task.reshape(P, -1), traj.tokens.reshape(P, 1 + K, 2, -1)[:, :, 0, :7]
    assert np.all(task == task[:, :1]) and len(set(task[:, 0].tolist())) == P
    assert np.all(prompt == prompt[:, :1])
    np.testing.assert_allclose(out.reward, traj.reward.reshape(P, 1 + K, -1).sum(-1), atol=1e-5)
    np.testing.assert_array_equal(out.written, traj.mask.reshape(P, 1 + K, -1).sum(-1))
    np.testing.assert_array_equal(out.length, traj.length.reshape(P, 1 + K, -1).sum(-1))
    np.testing.assert_array_equal(out.turns, traj.steps["played"].reshape(P, 1 + K, -1).sum(-1))
    assert set(out.info) == {"success", "heard", "size", "thinking"}
    assert np.all((out.success >= 0) & (out.success <= 1)) and out.success.any() and not out.success.all()
    np.testing.assert_array_equal(out.success, traj.terminated.reshape(P, 1 + K, -1).any(-1))


def test_greedy_tries_do_not_depend_on_the_temperature_and_sampled_ones_do():
    cold, hot = run(temperature=0.5), run(temperature=1.5)
    first = lambda out: out.trajectory.tokens.reshape(P, 1 + K, 2, -1)  # noqa: E731
    np.testing.assert_array_equal(first(cold)[:, 0], first(hot)[:, 0])
    assert not np.array_equal(first(cold)[:, 1:], first(hot)[:, 1:])
    frozen = first(run(temperature=0.0, prompt=3, end=0.0, cut=0.0, restart=0.0, reply=0))
    before_the_environment_speaks = frozen[..., 0, :8]
    assert np.all(before_the_environment_speaks == before_the_environment_speaks[:, :1])


def mixed_rows():
    """Four episodes of two tries: members 0, 0, 1, 1 with 1, 2, 2 and no turns; the second and third succeed."""
    traj = trajectory([[0, 1]] * 4, reward=[[0, 0], [0, 1], [0, 1], [0, 0]])
    played = np.array([[1, 0], [1, 1], [1, 1], [0, 0]], bool)
    env = np.array([0, 0, 1, 1])[:, None] * played
    steps = {"played": played, "env": env, "cut": played & False, "success": np.array([[0, 0], [0, 1], [0, 1], [0, 0]])}
    return traj._replace(steps=steps)


def test_a_mixture_reports_the_success_of_every_member_and_no_sum_of_indices():
    found = finalize(rollout_metrics(mixed_rows(), members=("a", "b")))
    assert "env" not in found
    assert [float(found[name]) for name in ("success", "success_a", "success_b")] == [0.5, 0.5, 1.0]
    out = summarize(mixed_rows(), 2, 2, mixed=True)
    assert "env" not in out.info and out.member.tolist() == [[0, 0], [1, -1]]
    assert "env" in summarize(mixed_rows(), 2, 2).info and "env" in rollout_metrics(mixed_rows())


def test_a_mixture_names_its_members():
    guess = envs.make("guess")
    both = envs.mixture((guess, envs.make("probe_observation"), guess))
    assert both.spec.members == ("guess", "probe_observation", "guess.2") and guess.spec.members == ()
    assert envs.held_out(both, "train", 0.1).spec.members == both.spec.members


def test_what_makes_no_evaluation_is_refused():
    for problems, samples in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"got {problems} and {samples}"):
            make_evaluate(POLICY, CODEC, talk(), problems=problems, samples=samples, max_tokens=8)
