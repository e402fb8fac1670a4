"""The probes' experts attain the stated optimal values, and the faults they stand for do not."""

import functools

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.envs import canonical_params, make
from agentrl_jax.envs.probes import CONTEXTS, DELAY, LIMIT, NAMES, optimal_value
from agentrl_jax.text import literal, to_str

# Compiling is nearly all the cost of these tests.


@functools.cache
def jitted(name):
    env = make(name)
    return jax.jit(env.reset), jax.jit(env.step), jax.jit(env.expert)


def play(name, *, discount=1.0, reward=1.0, seed=0, write=None):
    """Discounted return and steps of one episode; a cut episode is bootstrapped with the optimal value."""
    env, (reset, step, expert) = make(name), jitted(name)
    params = canonical_params(env.params._replace(reward=reward))
    key = jax.random.key(seed)
    state, ts = reset(key, params)
    total, steps = 0.0, [ts]
    for k in range(env.spec.max_turns):
        action = expert(key, state, params) if write is None else literal(write(to_str(ts.observation)), 2)
        state, ts = step(key, state, action, params)
        total += discount**k * float(ts.reward)
        steps.append(ts)
        if ts.terminated or ts.truncated:
            break
    if ts.truncated:
        total += discount ** (len(steps) - 1) * optimal_value(name, discount, reward)
    return total, steps


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_attains_the_optimal_value(name):
    for seed, discount in enumerate((0.5, 0.9, 0.99)):
        total, steps = play(name, discount=discount, reward=2.5, seed=seed)
        assert total == pytest.approx(optimal_value(name, discount, 2.5), rel=1e-5)
        assert bool(steps[-1].terminated) != bool(steps[-1].truncated)


def test_the_values_are_the_stated_formulas():
    expected = (1.0, 1.0, 0.9**DELAY, 0.9, 10.0, 0.9 ** (CONTEXTS - 1))
    assert [optimal_value(name, 0.9) for name in NAMES] == pytest.approx(expected)


def test_wrong_choices_earn_nothing_and_echoing_the_note_earns_all():
    assert play("probe_delayed", write=lambda seen: "0")[0] == 0
    assert play("probe_delayed", write=lambda seen: "1" if seen == "pick" else "0")[0] == 1
    assert play("probe_transition", write=lambda seen: "0")[0] == 0
    assert play("probe_observation", write=lambda seen: "")[0] == 0
    for seed in range(4):
        assert play("probe_observation", seed=seed, write=lambda seen: seen)[0] == 1
        assert play("probe_observation", seed=seed, write=lambda seen: str(1 - int(seen)))[0] == 0
        assert play("probe_restart", seed=seed, write=lambda seen: seen)[0] == 1


def test_a_blind_policy_earns_half_of_the_observation_probe():
    env = make("probe_observation")
    params = canonical_params(env.params)

    def one(key):
        state, _ = env.reset(key, params)
        return env.step(key, state, literal("1", 2), params)[1].reward

    mean = float(jnp.mean(jax.vmap(one)(jax.random.split(jax.random.key(1), 512))))
    assert abs(mean - 0.5) < 0.1


def test_transition_leads_where_the_action_says():
    assert to_str(play("probe_transition", write=lambda seen: "1")[1][1].observation) == "gold"
    assert to_str(play("probe_transition", write=lambda seen: "")[1][1].observation) == "coal"


def test_contexts_restart_between_turns_and_show_only_the_note():
    _, steps = play("probe_restart", write=lambda seen: "ab")
    assert [bool(ts.restart) for ts in steps] == [False] + [True] * (CONTEXTS - 1) + [False]
    assert [to_str(ts.observation) for ts in steps[1:]] == ["a"] * CONTEXTS


def test_truncation_never_terminates_and_always_looks_the_same():
    _, steps = play("probe_truncation", discount=0.9)
    assert len(steps) == LIMIT + 1 and not any(ts.terminated for ts in steps)
    assert {to_str(ts.observation) for ts in steps} == {"tick"}
    assert [bool(ts.truncated) for ts in steps] == [False] * LIMIT + [True]


@pytest.mark.parametrize(
    ("name", "discount", "message"),
    [
        ("probe", 0.9, "probe_restart"),
        ("probe_truncation", 1.0, "below 1"),
        ("probe_delayed", 1.5, "1.5"),
        ("probe_delayed", float("nan"), "nan"),
    ],
)
def test_bad_arguments_of_optimal_value(name, discount, message):
    with pytest.raises(ValueError, match=message):
        optimal_value(name, discount)
