"""The calculator environment: golden episodes, exact values, untrusted actions, the imperfect teacher."""

import ast
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_jax import bigint as bi
from agentrl_jax import text as tx
from agentrl_jax.envs.base import canonical_params
from agentrl_jax.envs.calculator import CalculatorParams, calculator
from agentrl_jax.types import Text

ENV = functools.cache(calculator)
EXACT = CalculatorParams(teacher_wrong=0.0, teacher_guess=0.0)


N = 512  # one batch size, so that every function is compiled once


@functools.cache
def jitted_step():
    return jax.jit(ENV().step)


@functools.cache
def batched(env):
    return (
        jax.jit(jax.vmap(env.reset, (0, None))),
        jax.jit(jax.vmap(env.step, (0, 0, 0, None))),
        jax.jit(jax.vmap(env.expert, (0, 0, None))),
    )


def reset(seed, params, env=None):
    env = ENV() if env is None else env
    return batched(env)[0](jax.random.split(jax.random.key(seed), N), canonical_params(params))


@functools.cache
def some_state():
    return jax.tree.map(lambda x: np.asarray(x)[0], reset(0, EXACT)[0])


def expert(state, params):
    """The expert's actions in one state, for N keys."""
    state = jax.tree.map(lambda x: np.broadcast_to(x, (N, *np.shape(x))), state)
    return rows(batched(ENV())[2](jax.random.split(jax.random.key(0), N), state, canonical_params(params)))


def act(raw):
    return tx.literal(raw, 48)


def start(question="12*(34+5)"):
    """A state that asks a given question."""
    state = some_state()
    text = tx.literal(question + "=?", state.question.data.shape[0])
    observation = tx.literal(question + "=?", state.observation.data.shape[0])
    return state._replace(question=text, answer=bi.from_int(eval(question)), observation=observation)


def step(state, raw, params=EXACT):
    return jitted_step()(jax.random.key(0), state, act(raw), canonical_params(params))


def rows(text):
    data, length = np.asarray(text.data), np.asarray(text.length)
    assert not np.any(data * (np.arange(data.shape[1]) >= length[:, None]))
    return [data[i, : length[i]].tobytes().decode() for i in range(len(length))]


def info(ts):
    return {k: float(v) for k, v in ts.info.items()}


def test_golden_episode():
    state = start()
    state, ts = step(state, "I need 34+5 first.\ncalc 12*(34+5)")
    assert tx.to_str(ts.observation) == "468" and float(ts.reward) == 0
    assert not ts.terminated and not ts.truncated
    assert info(ts) == {"success": 0, "tool_calls": 1, "malformed": 0, "answered": 0}
    state, ts = step(state, "answer 468")
    assert float(ts.reward) == 1 and ts.terminated and not ts.truncated and tx.to_str(ts.observation) == ""
    assert info(ts) == {"success": 1, "tool_calls": 0, "malformed": 0, "answered": 1}


OBSERVATIONS = {
    "calc 7//0": "error: division by zero",
    "calc 999999999999999999+1": "error: overflow",
    "calc (1": "error: malformed",
    "calc 1+1+1+1+1+1+1+1+1+1": "error: too long",
    "calc": "error: use calc or answer",
    "calculate 1": "error: use calc or answer",
    "": "error: use calc or answer",
    "answer": "error: use calc or answer",
    "answer x": "error: use calc or answer",
    "answer 4 68": "error: use calc or answer",
    "468": "error: use calc or answer",
    "answer 468\nthat is it": "error: use calc or answer",
    "calc 1+1\ncalc 2*3\n \n": "6",
    "calc -7//2": "-4",
    "calc -7 % 2 ": "1",
    "calc 999999999*999999999": "999999998000000001",
}


@pytest.mark.parametrize("action", OBSERVATIONS)
def test_observations(action):
    state, ts = step(start(), action)
    assert tx.to_str(ts.observation) == OBSERVATIONS[action] == tx.to_str(state.observation)
    assert not ts.terminated and float(ts.reward) == 0 and int(state.turns) == 1
    known = action.startswith("calc ") and OBSERVATIONS[action] not in ("error: malformed", "error: too long")
    assert info(ts) == {"success": 0, "tool_calls": known, "malformed": not known, "answered": 0}


@pytest.mark.parametrize(
    ("answer", "right"),
    [("468", 1), ("+468", 1), ("0468", 1), (" 468 ", 1), ("469", 0), ("-468", 0), ("9" * 19, 0), ("46", 0)],
)
def test_answers_are_exact(answer, right):
    _, ts = step(start(), "answer " + answer)
    assert ts.terminated and float(ts.reward) == right == float(ts.info["success"])


def test_costs_are_traced_parts_of_the_reward():
    params = EXACT._replace(call_cost=0.25, error_cost=0.5)
    expected = {"calc 1+1": -0.25, "calc 1//0": -0.75, "calc (": -0.5, "hm": -0.5, "answer 468": 1, "answer 1": 0}
    for action, reward in expected.items():
        assert float(step(start(), action, params)[1].reward) == reward


def test_turn_limit_truncates_with_an_observation():
    state = start()
    for turn in range(4):
        state, ts = step(state, "calc 2+2")
        assert bool(ts.truncated) == (turn == 3) and tx.to_str(ts.observation) == "4"
    state = state._replace(turns=np.int32(3))
    _, ts = step(state, "answer 468")
    assert ts.terminated and not ts.truncated and float(ts.reward) == 1


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=48),
        st.binary(max_size=43).map(lambda b: b"calc " + b),
        st.binary(max_size=41).map(lambda b: b"answer " + b),
        st.text("calc answer0123456789+-*/%()\n ", max_size=48).map(str.encode),
    )
)
@example(b'{"name": "add", "args": {')
@example(b"calc 12*(34+")
@example(b"\xff" * 48)
@example(b"calc " + b"(" * 43)
@example(b"calc " + b"9" * 43)
@example(b"\0" * 48)
def test_any_bytes_are_an_action(raw):
    _, ts = step(start(), raw)
    data, length = np.asarray(ts.observation.data), int(ts.observation.length)
    assert data.shape == (ENV().spec.max_observation,) and not data[length:].any()
    out = info(ts)
    assert set(out.values()) <= {0.0, 1.0} and out["tool_calls"] + out["malformed"] + out["answered"] == 1
    line = raw.strip(b" \t\n\v\f\r").split(b"\n")[-1].strip(b" \t\n\v\f\r")
    answer = re.fullmatch(rb"answer [ \t\v\f\r]*([+-]?[0-9]+)", line)
    assert bool(ts.terminated) == (answer is not None)
    assert float(ts.reward) == (answer is not None and int(answer[1]) == 468)
    if not answer and not line.startswith(b"calc "):
        assert tx.to_str(ts.observation) == "error: use calc or answer"


def test_one_bad_row_leaves_the_others_alone():
    p, keys = canonical_params(EXACT), jax.random.split(jax.random.key(1), N)
    state, _ = reset(1, EXACT)
    good = [b"calc 1+2", b"answer 3", b"calc 9//4", b"calc (1)"] * (N // 4)

    def play_turn(raws):
        action = Text(np.stack([act(r).data for r in raws]), np.asarray([len(r) for r in raws], np.int32))
        return batched(ENV())[1](keys, state, action, p)

    clean = play_turn(good)
    for bad in (b"calc 1//0", b"\xff\xfe", b"", b"calc " + b"1+" * 21):
        dirty = play_turn([*good[:2], bad, *good[3:]])
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            np.testing.assert_array_equal(np.delete(np.asarray(a), 2, 0), np.delete(np.asarray(b), 2, 0))


def depth_of(s):
    depths = np.cumsum([(c == "(") - (c == ")") for c in s])
    return int(depths.max(initial=0))


def operators_of(s):
    return sum(isinstance(n, ast.BinOp) for n in ast.walk(ast.parse(s, mode="eval")))


HARD = CalculatorParams(
    min_digits=1, max_digits=4, min_operators=1, max_operators=3, max_depth=2, floordiv=1.0, mod=1.0, teacher_wrong=0.0,
    teacher_guess=0.0,
)  # fmt: skip


def test_questions_are_valid_and_their_answers_exact():
    state, ts = reset(2, HARD)
    questions = rows(ts.observation)
    assert all(q.endswith("=?") for q in questions) and rows(state.question) == questions
    expressions = [q[:-2] for q in questions]
    answers = [bi.to_int(bi.BigInt(x)) for x in np.asarray(state.answer.limbs)]
    assert answers == [eval(e) for e in expressions]
    assert rows(jax.vmap(ENV().privileged)(state)) == [str(a) for a in answers]
    operands = [re.findall(r"[0-9]+", e) for e in expressions]
    assert {len(x) for o in operands for x in o} == {1, 2, 3, 4} and not any(x[0] == "0" for o in operands for x in o)
    assert {operators_of(e) for e in expressions} == {1, 2, 3} and {depth_of(e) for e in expressions} == {0, 1, 2}
    assert {o for e in expressions for o in re.findall(r"//|[-+*%]", e)} == {"+", "-", "*", "//", "%"}
    assert len(set(expressions)) > 490


def test_difficulty_is_traced():
    easy = EXACT._replace(max_digits=2, max_operators=1)
    for params, digits, operators in ((CalculatorParams(), {2, 3}, {1, 2}), (easy, {2}, {1})):
        expressions = [q[:-2] for q in rows(reset(3, params)[1].observation)]
        assert {len(x) for e in expressions for x in re.findall(r"[0-9]+", e)} == digits
        assert {operators_of(e) for e in expressions} == operators
        assert not any("/" in e or "%" in e for e in expressions)  # weight 0
    assert batched(ENV())[0]._cache_size() == 1


def test_default_prompts_are_short():
    lengths = np.asarray(reset(4, CalculatorParams())[1].observation.length)
    assert lengths.min() >= 7 and lengths.max() <= 15


def test_a_single_operator_and_parameters_beyond_capacity():
    params = CalculatorParams(
        min_digits=9, max_digits=99, max_operators=50, max_depth=9, add=0.0, sub=0.0, mul=0.0, mod=2.0
    )
    state, ts = reset(5, params)
    expressions = [q[:-2] for q in rows(ts.observation)]
    assert all(len(x) == 4 for e in expressions for x in re.findall(r"[0-9]+", e))
    assert all(set(re.findall(r"//|[-+*%]", e)) <= {"%", "-"} for e in expressions)
    assert [bi.to_int(bi.BigInt(x)) for x in np.asarray(state.answer.limbs)] == [eval(e) for e in expressions]


def play(env, params, seed):
    """Episodes of the expert: total reward ``[N]``, turns until the end ``[N]``, actions of the first turn."""
    _, run, teach = batched(env)
    p = canonical_params(params)
    keys = jax.random.split(jax.random.key(seed), N)
    state, _ = reset(seed, params, env)
    total, alive, turns, first = np.zeros(N), np.ones(N, bool), np.zeros(N, int), None
    for turn in range(env.spec.max_turns):
        step_keys = jax.vmap(lambda k: jax.random.fold_in(k, turn))(keys)
        action = teach(step_keys, state, p)
        first = rows(action) if first is None else first
        state, ts = run(keys, state, action, p)
        total += alive * np.asarray(ts.reward)
        turns += alive
        alive &= ~np.asarray(ts.terminated | ts.truncated)
    return total, turns, first


def wide():
    return ENV(max_digits=9, max_operators=2, max_depth=1, max_action=64)


def test_exact_to_eighteen_digits():
    params = EXACT._replace(min_digits=9, max_digits=9, mul=2.0, floordiv=1.0, mod=1.0)
    state, ts = reset(6, params, wide())
    answers = [bi.to_int(bi.BigInt(x)) for x in np.asarray(state.answer.limbs)]
    assert answers == [eval(q[:-2]) for q in rows(ts.observation)]
    assert sum(abs(a) > 2**53 for a in answers) > 100 and max(map(abs, answers)) < 10**18
    total, turns, _ = play(wide(), params, 6)
    assert np.all(total == 1) and np.all(turns == 2)


def test_questions_that_cannot_be_drawn_fall_back():
    params = EXACT._replace(min_digits=9, max_digits=9, min_operators=2, add=0.0, sub=0.0)  # 25 digits, always
    state, ts = reset(7, params, wide())
    for question, limbs in zip(rows(ts.observation), np.asarray(state.answer.limbs), strict=True):
        a, b = map(int, question[:-2].split("-"))
        assert bi.to_int(bi.BigInt(limbs)) == a - b and min(a, b) >= 10**8


@pytest.mark.parametrize(("wrong", "guess"), [(0.0, 0.0), (0.3, 0.0), (0.25, 0.4)])
def test_the_teacher_fails_as_often_as_told(wrong, guess):
    params = CalculatorParams(teacher_wrong=wrong, teacher_guess=guess)
    total, turns, first = play(ENV(), params, 8)
    guesses = np.asarray([a.startswith("answer ") for a in first])
    assert all(a.startswith(("answer ", "calc ")) for a in first)
    assert np.array_equal(turns == 1, guesses) and np.all(turns <= 2)
    rate = (1 - wrong) * (1 - guess)
    assert abs(total.mean() - rate) <= 4 * np.sqrt(rate * (1 - rate) / N) + 0.01  # 0.01: lucky guesses
    assert abs(guesses.mean() - guess) <= 4 * np.sqrt(guess * (1 - guess) / N)


def test_the_teacher_corrects_itself_after_an_error():
    faulty = EXACT._replace(teacher_wrong=1.0)
    state, _ = step(start(), "calc (")
    assert set(expert(state, faulty._replace(teacher_guess=1.0))) == {"calc 12*(34+5)"}
    spoiled = expert(start(), faulty)
    assert all(sum(a != b for a, b in zip(s, "calc 12*(34+5)", strict=True)) == 1 for s in spoiled)
    assert {i for s in spoiled for i in range(len(s)) if s[i] != "calc 12*(34+5)"[i]} == {5, 6, 9, 10, 12}
    guesses = expert(start(), EXACT._replace(teacher_guess=1.0))
    assert all(re.fullmatch("answer [1-9][0-9]{2}", g) for g in guesses) and len(set(guesses)) > 200


def test_anchor_is_what_the_agent_sees():
    anchor = jax.jit(ENV().anchor)
    state = start()
    assert int(anchor(state)) == int(anchor(start())) != int(anchor(start("12*(34+6)")))
    called, _ = step(state, "calc 1+1")
    again, _ = step(step(state, "hm")[0], "calc 2")
    assert int(anchor(called)) == int(anchor(again)) != int(anchor(state))


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ({"max_turns": 0}, "max_turns"),
        ({"max_digits": 19}, "max_digits"),
        ({"max_operators": 0}, "max_operators"),
        ({"max_action": 20}, "max_action"),
        ({"max_depth": -1}, "max_depth"),
        ({"params": CalculatorParams(max_digits=9)}, "exceeds the capacity max_digits=4"),
        ({"params": CalculatorParams(max_digits=1)}, "params.max_digits must be at least 2, got 1"),
        ({"params": CalculatorParams(min_operators=0)}, "params.min_operators must be at least 1, got 0"),
        ({"params": CalculatorParams(max_depth=np.int32(-1))}, "params.max_depth must be at least 0, got -1"),
        ({"params": CalculatorParams(mul=np.float32(-1))}, r"params.mul must be .* in \[0, inf\], got -1"),
        ({"params": CalculatorParams(teacher_guess=1.5)}, r"params.teacher_guess must be .* in \[0, 1\], got 1.5"),
        ({"params": CalculatorParams(teacher_wrong=float("nan"))}, "params.teacher_wrong must be a finite number"),
        ({"params": CalculatorParams(call_cost=float("inf"))}, "params.call_cost must be a finite number"),
    ],
)
def test_refusals(static, message):
    with pytest.raises(ValueError, match=message):
        calculator(**static)


def test_traced_difficulty_is_not_looked_at():
    def capacity(digits):
        return np.zeros(calculator(params=CalculatorParams(max_digits=digits)).spec.max_observation)

    assert jax.eval_shape(capacity, 9).shape == (ENV().spec.max_observation,)
