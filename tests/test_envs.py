"""The registry, the conformance suite on everything registered and on broken environments, and ``guess``."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.control import while_any
from agentrl_jax.envs import canonical_params, check_env, make, names, register, registry
from agentrl_jax.text import literal, to_str
from agentrl_jax.types import Text, TimeStep

# Compiling is nearly all the cost of these tests.
DATA = str(Path(__file__).parents[1] / "experiments" / "data" / "arithmetic_words.jsonl")


def build(name):
    return make(name, path=DATA) if name == "tasks" else make(name)


# --- registry ---------------------------------------------------------------------------------------------------------


def test_equal_calls_return_the_identical_object():
    assert make("guess") is make("guess") is make("guess", max_turns=12)
    assert make("guess", max_turns=3) is not make("guess")
    assert {"calculator", "guess", "tasks", "probe_restart"} <= set(names()) and list(names()) == sorted(names())


def test_an_environment_is_static_and_never_retraces():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def first(env, key, params):
        traces.append(env.name)
        return env.reset(key, params)[1].observation

    for high in (10, 20, 30):
        first(make("guess"), jax.random.key(0), canonical_params(make("guess").params._replace(high=high)))
    assert traces == ["guess"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("gues"), "unknown environment 'gues'; known: .*guess.*tasks"),
        (lambda: make("guess", turns=3), r"'guess' takes guess\(max_turns: .*turns"),
        (lambda: make("tasks"), r"takes tasks\(path.*missing a required argument: 'path'"),
        (lambda: make("guess", max_turns=[3]), r"max_turns must be hashable.*\[3\]"),
        (lambda: make("guess", max_turns=0), "max_turns must be at least 1, got 0"),
        (lambda: register("guess", lambda: None), "already registered"),
        (lambda: register("a b", lambda: None), "without spaces, got 'a b'"),
        (lambda: register("", lambda: None), "non-empty"),
        (lambda: register("mine", 3), "callable, got 3"),
    ],
)
def test_bad_calls_name_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_registered_factories_are_made_once(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    built = []

    def factory(size: int = 1, **options):
        built.append((size, options))
        return make("probe_delayed")._replace(name=f"mine{size}")

    register("mine", factory)
    assert "mine" in names() and make("mine") is make("mine", size=1)
    # 1 and True, and 1 and 1.0, are equal in Python and are not the same argument.
    make("mine", size=True), make("mine", size=1.0), make("mine", a=1), make("mine", a=1)
    assert [size for size, _ in built] == [1, True, 1.0, 1]
    register("wrong", lambda: 3)
    with pytest.raises(TypeError, match="'wrong' returned int"):
        make("wrong")


def test_import_and_make_do_no_device_work():
    code = (
        "import agentrl_jax.envs as e, jax._src.xla_bridge as b\n"
        "env = e.make('calculator'); hash(env); e.held_out(e.mixture([env, e.make('guess')]))\n"
        "assert not b.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_everything_registered_conforms(name):
    report = check_env(build(name), episodes=16)
    assert report.expert is not None and report.expert >= report.random
    if name not in ("probe_one_action", "probe_truncation"):
        assert report.expert > report.random


GOOD = make("probe_observation")


def with_step(change):
    """``GOOD`` with ``change(action, state, timestep)`` of its step."""

    def step(key, state, action, params):
        return change(action, *GOOD.step(key, state, action, params))

    return GOOD._replace(step=step)


def with_reset(change):
    return GOOD._replace(reset=lambda key, params: change(key, *GOOD.reset(key, params)))


def observe(ts, data, length):
    return ts._replace(observation=Text(data, length))


def untraceable(key, params):
    return GOOD.reset(key, params) if params.reward > 0 else None


def batch_dependent(action, state, ts):
    # The body counts on for rows that are done, so the result depends on the longest action of the batch.
    count = while_any(lambda n: n < action.length, lambda n: n + 1, jnp.int32(0))
    return state, ts._replace(reward=count)


BROKEN = {
    "must be hashable": GOOD._replace(params=np.zeros(2)),
    "Python or NumPy scalars": GOOD._replace(params=("one",)),
    "positive Python ints": GOOD._replace(spec=GOOD.spec._replace(max_turns=0)),
    "dtype of info": GOOD._replace(spec=GOOD.spec._replace(info=(("success", "float64"),))),
    "no random key": with_reset(lambda key, s, ts: ((s, key), ts)),
    "no Python if": GOOD._replace(reset=untraceable),
    "reset must return .state, TimeStep": with_reset(lambda key, s, ts: (s, ts.observation)),
    "structure, shapes and dtypes": with_step(lambda a, s, ts: (s._replace(turn=s.turn * 1.0), ts)),
    "declares only": with_step(lambda a, s, ts: (s, ts._replace(info={"sucess": 1.0}))),
    "info of step must be scalars": with_step(lambda a, s, ts: (s, ts._replace(info={"success": jnp.ones(2)}))),
    "bytes of its spec": with_step(lambda a, s, ts: (s, observe(ts, jnp.zeros(9, jnp.uint8), 0))),
    "length must be int32": with_step(lambda a, s, ts: (s, observe(ts, jnp.zeros(8, jnp.uint8), jnp.ones(1)))),
    "expert must have at most": GOOD._replace(expert=lambda key, s, p: literal("far too long")),
    "anchor must be one uint32": GOOD._replace(anchor=lambda s: s.bit),
    "privileged must be a Text": GOOD._replace(privileged=lambda s: s.bit),
    "two traces": with_reset(lambda key, s, ts: (s._replace(bit=jnp.int32(np.random.randint(10**6))), ts)),
    "zero at and beyond": with_step(lambda a, s, ts: (s, observe(ts, jnp.ones(8, jnp.uint8), jnp.int32(3)))),
    "length of an observation": with_step(lambda a, s, ts: (s, observe(ts, jnp.zeros(8, jnp.uint8), jnp.int32(9)))),
    "rewards must be finite": with_step(lambda a, s, ts: (s, ts._replace(reward=0.0 / a.length))),
    "not both be set": with_step(lambda a, s, ts: (s, ts._replace(truncated=True))),
    "role must be in": with_step(lambda a, s, ts: (s, ts._replace(role=1))),
    "must not set terminated": with_reset(lambda key, s, ts: (s, ts._replace(terminated=True))),
    "other rows of the batch": with_step(batch_dependent),
    "at least what random": GOOD._replace(expert=lambda key, s, p: literal("", 2)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_environments_are_refused_with_the_rule(rule):
    with pytest.raises(AssertionError, match=f"environment 'probe_observation': .*{rule}"):
        check_env(BROKEN[rule], episodes=4)


def test_a_good_environment_without_extras_passes():
    plain = GOOD._replace(expert=None)
    assert check_env(plain, jax.random.key(3), 4).expert is None


def test_check_env_refuses_bad_arguments():
    with pytest.raises(ValueError, match="takes an Environment, got str"):
        check_env("guess")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        check_env(GOOD, episodes=0)


# --- guess ------------------------------------------------------------------------------------------------------------


@functools.cache
def guess():
    env = make("guess")
    return env, jax.jit(env.reset), jax.jit(env.step), jax.jit(env.expert), jax.jit(env.anchor)


def guessing(target, writes, low=1, high=100):
    env, reset, step, _, _ = guess()
    params = canonical_params(env.params._replace(low=low, high=high))
    state, first = reset(jax.random.key(0), params)
    state = state._replace(target=jnp.int32(target))
    steps: list[TimeStep] = []
    for text in writes:
        state, ts = step(jax.random.key(1), state, literal(text, env.spec.max_action), params)
        steps.append(ts)
    return first, state, steps


def test_guess_replies():
    first, state, steps = guessing(42, ["50", "x", "10", "\xff", "I say\n 42 "])
    assert to_str(first.observation) == "guess 1..100"
    replies = [to_str(ts.observation) for ts in steps]
    assert replies[0] == "lower" and replies[2] == "higher" and replies[4] == ""
    assert replies[1] == replies[3] and replies[1].startswith("error: ")
    assert [float(ts.info["malformed"]) for ts in steps] == [0, 1, 0, 1, 0]
    assert [float(ts.reward) for ts in steps] == [0, 0, 0, 0, 1]
    assert [bool(ts.terminated) for ts in steps] == [False] * 4 + [True]
    assert (int(state.low), int(state.high)) == (11, 49)


def test_guesses_far_outside_wrap_nothing():
    _, state, steps = guessing(10**9, ["2147483647", "-2147483648", "1000000000"], -(10**9), 10**9)
    assert [to_str(ts.observation) for ts in steps] == ["lower", "higher", ""]
    assert (int(state.low), int(state.high)) == (-(10**9), 10**9)


def test_an_empty_range_is_its_lower_end():
    env, reset, *_ = guess()
    state, first = reset(jax.random.key(0), canonical_params(env.params._replace(low=7, high=3)))
    assert to_str(first.observation) == "guess 7..7" and int(state.target) == 7


@pytest.mark.parametrize(("low", "high", "most"), [(1, 100, 7), (-5, 5, 4), (-(10**9), 10**9, 31), (3, 3, 1)])
def test_binary_search_needs_no_more_than_the_logarithm(low, high, most):
    env, reset, step, expert, _ = guess()
    params = canonical_params(env.params._replace(low=low, high=high, teacher_noise=0.0))
    for seed in range(3):
        key = jax.random.key(seed)
        state, _ = reset(key, params)
        replies = []
        for _ in range(most):
            state, ts = step(key, state, expert(key, state, params), params)
            replies.append(ts)
            if ts.terminated:
                break
        assert replies[-1].terminated and float(replies[-1].info["success"]) == 1


def test_guess_is_cut_after_its_turns_and_the_anchor_forgets_the_count():
    _, state, steps = guessing(42, ["50"] * 12)
    assert [bool(ts.truncated) for ts in steps] == [False] * 11 + [True]
    _, once, _ = guessing(42, ["50"])
    _, error, _ = guessing(42, ["50", "?"])
    _, other, _ = guessing(42, ["60"])
    anchor = guess()[4]
    assert int(anchor(state)) == int(anchor(once)) == int(anchor(error)) != int(anchor(other))
