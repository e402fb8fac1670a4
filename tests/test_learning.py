"""Every algorithm learns what it must on the probes, within a fixed budget and to a fixed bar."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CODEC, POLICY, biased

from agentrl_jax import (
    TrainConfig,
    TransformerConfig,
    UpdateConfig,
    algorithms,
    envs,
    make_hyper,
    make_train,
    scoring,
    transformer_policy,
)
from agentrl_jax.envs.probes import LIMIT, optimal_value
from agentrl_jax.rollout import rollout

# A little skill to begin with: digits and the end of an action are likely, as after a cold start.
DIGITS = functools.partial(biased, b"01", 5.0)


def learn(name, env_name, steps, config, *, policy=POLICY, params=None, seed=0, env_params=None, **numbers):
    """Final state and history of a run."""
    options = {k: numbers.pop(k) for k in ("shaping", "entropy_coef", "kl_coef") if k in numbers}
    algorithm, env = algorithms.make(name, **options), envs.make(env_name)
    run = jax.jit(make_train(policy, CODEC, env, algorithm, config, steps=steps))
    state, history = run(jax.random.key(seed), make_hyper(algorithm, env, **numbers), params)
    assert int(state.skipped) == 0 and np.all(history["max_logp_gap"] <= 1e-4)
    return state, jax.tree.map(np.asarray, history)


BUDGET = {
    "reinforce": {"learning_rate": 0.01},
    "rloo": {"learning_rate": 0.01},
    "grpo": {"learning_rate": 0.01},
    "ppo": {"learning_rate": 0.01},
    "online_dpo": {"learning_rate": 0.003},
}


def updates_of(name):
    """Two updates a step, where the algorithm corrects for the first."""
    return UpdateConfig(minibatches=1 if "single" in algorithms.make(name).needs else 2)


@pytest.mark.parametrize("name", BUDGET)
def test_every_algorithm_learns_to_read_its_observation(name):
    """Blind guessing earns a half; the digit must be read and echoed."""
    config = TrainConfig(64, 8, slots=64, max_tokens=8, update=updates_of(name))
    _, history = learn(name, "probe_observation", 100, config, params=DIGITS(end=5.0), **BUDGET[name])
    assert history["success"][:5].mean() < 0.7
    assert history["success"][-5:].mean() > 0.9


def first_values(state, env_name, count=8, tokens=40):
    """Values before the first written token of some episodes."""
    env, sizes = envs.make(env_name), {"episodes": count, "slots": count, "max_tokens": tokens}

    def values(p, key):
        traj = rollout(POLICY, CODEC, env, p, key, **sizes)
        return scoring.score(POLICY, p, scoring.View(), scoring.as_batch(traj)).value, traj.mask

    value, mask = (np.asarray(x) for x in jax.jit(values)(state.params["policy"], jax.random.key(9)))
    return value[np.arange(count), mask.argmax(1)]


def test_a_truncated_episode_is_bootstrapped():
    """One token a turn, so the discount by token is one by turn: ``r / (1 - discount)``, not what four turns pay."""
    discount, right = 0.8, optimal_value("probe_truncation", 0.8)
    wrong = (1 - discount**LIMIT) / (1 - discount)
    config = TrainConfig(8, 1, max_tokens=40, update=UpdateConfig(b2=0.9))
    state, _ = learn(
        "ppo", "probe_truncation", 200, config, params=biased(b"", 0, 40.0), learning_rate=0.05, discount=discount,
        lambda_=0.5, value_eps=1e9,
    )  # fmt: skip
    values = first_values(state, "probe_truncation")
    assert right == pytest.approx(5.0) and wrong < 3
    np.testing.assert_allclose(values, right, atol=0.25)


@pytest.mark.parametrize("env_name", ["probe_delayed", pytest.param("probe_transition", marks=pytest.mark.slow)])
def test_ppo_finds_what_pays_later_and_knows_its_worth(env_name):
    config = TrainConfig(64, 1, slots=64, max_tokens=36, update=UpdateConfig(epochs=2, minibatches=2))
    state, history = learn("ppo", env_name, 80, config, params=DIGITS(end=5.0), learning_rate=0.01, value_eps=1e9)
    assert history["success"][0] < 0.75 and history["success"][-5:].mean() > 0.9
    np.testing.assert_allclose(first_values(state, env_name).mean(), optimal_value(env_name, 1.0), atol=0.2)


def test_notes_are_learned_across_contexts():
    """Only the last row is paid, and only if the first ones wrote down what they saw: chance is a half, and from there
    luck alone finds a code. A few supervised steps give the beginning of one."""
    config = TrainConfig(64, 16, slots=64, max_tokens=8, segments=3, update=UpdateConfig(minibatches=2))
    taught, _ = learn("behavior_cloning", "probe_restart", 7, config, params=DIGITS(end=5.0), learning_rate=0.01)
    begun = taught.params["policy"]
    _, history = learn("grpo", "probe_restart", 50, config, params=begun, learning_rate=0.01)
    assert history["success"][:3].mean() < 0.85
    assert (history["success"][-5:].mean() - 0.5) / 0.5 > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGET)
def test_a_transformer_learns_from_nothing(name):
    """Random bytes at first: chance is a half and most actions are cut by their budget."""
    policy = transformer_policy(TransformerConfig(CODEC.vocab_size, layers=1, width=32, heads=2, value_head=True))
    config = TrainConfig(128, 8, max_tokens=8, update=updates_of(name))
    rates = {"learning_rate": 0.01 if name != "online_dpo" else 0.003}
    _, history = learn(name, "probe_observation", 200, config, policy=policy, **rates)
    assert history["success"][:5].mean() < 0.6
    assert history["success"][-5:].mean() > 0.9
    assert jnp.all(jnp.asarray(history["reward"]) <= 1)
