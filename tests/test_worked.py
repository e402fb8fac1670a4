"""Worked numbers of the cards that come out of whole parts and presets, not of one function."""

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import golden

from agentrl_jax import algorithms, metrics, rewards, scoring, stages
from agentrl_jax.algorithm import Shape
from agentrl_jax.types import Score


def lines(turn, reward, **steps):
    """Episodes of one group whose tokens are all written: ``turn`` ``[N, T]``; rewards and parts a turn, ``[N, K]``."""
    turn, reward = np.asarray(turn), np.asarray(reward, np.float32)
    traj = batches.trajectory(np.ones(turn.shape), turns=reward.shape[1])
    ends = np.stack([np.searchsorted(row, np.arange(reward.shape[1]), "right") - 1 for row in turn])
    paid = np.zeros(turn.shape, np.float32)
    np.put_along_axis(paid, ends, reward, 1)
    known = {name: jnp.asarray(x, jnp.float32) for name, x in {"reward": reward, **steps}.items()}
    return traj._replace(
        turn=jnp.asarray(turn, jnp.int32), reward=jnp.asarray(paid), steps={"played": traj.steps["played"], **known}
    )


def prepared(algorithm, traj):
    count, width = traj.tokens.shape
    turns = traj.steps["played"].shape[1]
    memory = algorithm.init(jax.random.key(0), Shape(count, count, width, turns))
    lent = batches.tools(traj, group_size=count)
    run = jax.jit(lambda traj, hyper: algorithm.prepare(memory, traj, lent, hyper, jax.random.key(1))[1])
    return run(traj, algorithm.hyper)


def test_step_grpo_worked_example():
    """Right, valid, and 3 of its 5 steps are key steps; against a wrong one that has none of it."""
    key_steps = [[1, 0, 1, 1, 0, 0], [0] * 6]
    ends = [[0, 0, 0, 0, 0, 1], [0] * 6]
    b = prepared(
        algorithms.make("step_grpo"), lines([range(6)] * 2, ends, success=ends, answered=ends, tool_calls=key_steps)
    )
    total = np.asarray(b.traj.reward).sum(1)
    np.testing.assert_allclose(total, [golden("A17"), 0], atol=1e-6)
    np.testing.assert_allclose(b.adv, np.full((2, 6), [[0.5**0.5], [-(0.5**0.5)]]), atol=1e-5)


def test_posterior_grpo_worked_example():
    outcome = [[1], [1], [0], [0]]
    traj = lines(
        [[0, 0]] * 4, outcome, success=outcome, answered=[[1], [1], [1], [0]], tool_calls=[[0.9], [0.4], [0.8], [0.8]]
    )
    b = prepared(algorithms.make("posterior_grpo"), traj)
    np.testing.assert_allclose(np.asarray(b.traj.reward).sum(1), golden("A24.R"), atol=1e-6)
    np.testing.assert_allclose(b.adv, np.tile(golden("A24.A")[:, None], 2), atol=1e-5)


def test_process_reward_at_line_ends_worked_example():
    """PSGPO's dense reward, ``1/4 PRM / lines`` at the end of a line beside the tests' own, is a turn reward.

    The card gives the result alone; verdicts of .6 and -.4 on two lines of a program that passes have it.
    """
    traj = lines([[0, 0, 1]], [[0, 1]])
    verdict = jnp.asarray([[0.6, -0.4]])
    b = rewards.add_turn_rewards(scoring.as_batch(traj), 0.25 * verdict / 2, batches.tools(traj))
    np.testing.assert_allclose(b.traj.reward[0], golden("B14"), atol=1e-6)


@pytest.mark.parametrize(
    "options, name", [({}, "loss"), ({"label_margin": 0.5}, "margin"), ({"centre_coef": 0.01}, "center")]
)
def test_a_reward_model_worked_example(options, name):
    algorithm = algorithms.prefer(loss="bradley_terry", **options)
    traj = batches.trajectory(np.ones((4, 3)), group=[0, 0, 1, 1])
    pair = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
    b = stages.as_pairs(batches.batch(traj), pair, jnp.ones(2, bool), batches.tools(traj, groups=2, group_size=2))
    b = algorithm.weigh(b, algorithm.hyper, 1)

    def loss(told):
        score = Score(b.logp_old, jnp.zeros_like(b.logp_old), jnp.zeros_like(b.logp_old), told[..., None])
        return algorithm.loss({"policy": score}, b, algorithm.hyper)

    told = np.array([[1.2, 0.7], [0.3, 0.5]], np.float32)
    (value, found), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(told)
    assert float(value) == pytest.approx(float(golden(f"C13.{name}")), abs=1e-6)
    assert float(metrics.finalize(found)["preference_accuracy"]) == golden("C13.acc")
    gap = told[:, 0] - told[:, 1] - options.get("label_margin", 0.0)
    slope = -1 / (1 + np.exp(gap))
    centre = 2 * options.get("centre_coef", 0.0) * told.sum(1)
    np.testing.assert_allclose(grad, np.stack([centre + slope, centre - slope], 1) / 2, atol=1e-6)
