"""Reading the user's questions, the rule of agreement, and the environment."""

import functools
import json
from decimal import Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.envs import canonical_params, held_out, make
from agentrl_jax.envs.tasks import State, TasksError, load_tasks, matches
from agentrl_jax.envs.transforms import check_split
from agentrl_jax.text import literal, to_str

DATA = Path(__file__).parents[1] / "experiments" / "data" / "arithmetic_words.jsonl"
# Compiling is nearly all the cost of these tests.
OK = b'{"prompt": "one", "answer": 1}\n'


def write(tmp_path, raw):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(raw)
    return path


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_shipped_problems_are_right():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    assert len(rows) >= 300 and len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row["expression"]) <= set("0123456789+-*/% ()")
        assert eval(row["expression"]) == row["answer"]
        assert len(row["prompt"].encode()) <= 100
        assert row["prompt"].endswith(("?", "."))
    assert np.mean([len(row["prompt"]) < 80 for row in rows]) > 0.9
    assert load_tasks(DATA).report == (len(rows), (), ())


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("5", "5"),
        ("-7", "-7"),
        ('" x y "', "x y"),
        ("2.50", "2.50"),
        ("2.5e3", "2500"),
        ("1E-3", "0.001"),
        ('"é"', "é"),
    ],
)
def test_answers_are_written_in_full(tmp_path, answer, text):
    path = write(tmp_path, f'{{"prompt": " p ", "answer": {answer}}}'.encode())
    assert load_tasks(path).rows == ((b"p", text.encode(), b"", 1),)


def test_blank_lines_a_byte_order_mark_and_other_keys_are_skipped(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + OK + b"\n  \r\n" + b'{"prompt": "two", "answer": "2", "source": [1]}\r\n')
    table = load_tasks(path)
    assert [(row.prompt, row.line) for row in table.rows] == [(b"one", 1), (b"two", 4)]
    assert str(table.report) == "2 of 2 rows kept"


def test_duplicates_and_over_long_rows_are_dropped_and_reported(tmp_path):
    long = json.dumps({"prompt": "x" * 300, "answer": 1}).encode() + b"\n"
    spelled = b'{"answer": "1", "prompt": "one "}\n'
    report = load_tasks(write(tmp_path, OK + long + spelled + OK)).report
    assert report == (4, (3, 4), (2,))
    assert str(report) == "1 of 4 rows kept; 2 duplicate dropped (line 3, 4); 1 over-long dropped (line 2)"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "JSON object with 'prompt' and 'answer', got list"),
        (b'{"prompt": "a"}', "missing key 'answer'"),
        (b'{"answer": 3}', "missing key 'prompt'"),
        (b'{"prompt": 1, "answer": 2}', "'prompt' must be a string, got int 1"),
        (b'{"prompt": "a", "answer": null}', "'answer' must be a string or a number, got NoneType"),
        (b'{"prompt": "a", "answer": true}', "got bool True"),
        (b'{"prompt": "a", "answer": [2]}', "got list"),
        (b'{"prompt": "a", "answer": NaN}', "NaN is not a number"),
        (b'{"prompt": "a", "answer": 1e999999999}', "exponent"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": " ", "answer": 2}', "'prompt' is empty"),
        (b'{"prompt": "a", "answer": "\\t"}', "'answer' is empty"),
        (b'{"prompt": "a", "answer": "b\\nc"}', "'answer' must be one line"),
        (b'{"prompt": "a\\u0000", "answer": 2}', "'prompt' contains a NUL"),
        (b'{"prompt": "\\ud800", "answer": 2}', "half a surrogate pair"),
        (b'{"prompt": "\xff", "answer": 2}', "not UTF-8 .byte 13"),
        (b'{"prompt": "a", "prompt": "b", "answer": 2}', "a key is repeated"),
        (b'{"prompt": "one", "answer": 2}', "'one' has two answers: '1' in line 1, '2' in line 2"),
        (b'{"prompt": "a", "answer": 2, "expression": 2}', "'expression' must be a string"),
        (b'{"prompt": "a", "answer": 2, "expression": "1+2"}', "gives 3, but 'answer' is '2'"),
        (b'{"prompt": "a", "answer": "b", "expression": "1+2"}', "gives 3, but 'answer' is 'b'"),
        (b'{"prompt": "a", "answer": 8, "expression": "2**3"}', "malformed"),
        (b'{"prompt": "a", "answer": 8, "expression": "f(8)"}', "only digits"),
        (b'{"prompt": "a", "answer": 8, "expression": "8//0"}', "malformed"),
        (b'{"prompt": "a", "answer": 0, "expression": "1-1+1-1+1-1+1-1+1-1"}', "has 9 operators"),
    ],
)
def test_a_malformed_row_is_named_with_its_file_line_and_reason(tmp_path, row, reason):
    with pytest.raises(TasksError, match=rf"tasks\.jsonl: .*{reason}") as error:
        load_tasks(write(tmp_path, OK + row))
    assert "line 2" in str(error.value)


def test_a_file_without_usable_rows_is_refused(tmp_path):
    with pytest.raises(TasksError, match="cannot be read"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TasksError, match="no usable rows"):
        load_tasks(write(tmp_path, b"\n"))
    with pytest.raises(TasksError, match=r"no usable rows .0 of 1 rows kept; 1 over-long"):
        load_tasks(write(tmp_path, OK), max_prompt=2)


# --- the rule of agreement --------------------------------------------------------------------------------------------


@functools.cache
def _matches(ignore_case):
    return jax.jit(functools.partial(matches, ignore_case=ignore_case))


def agree(given_text, wanted, ignore_case=False):
    return bool(_matches(ignore_case)(literal(given_text, 48), literal(wanted, 48)))


@pytest.mark.parametrize(
    ("given_text", "wanted", "expected"),
    [
        (" 42 ", "42", True),
        ("+0042", "42", True),
        ("-0", "0", True),
        ("42.0", "42", True),
        ("42.", "42", True),
        ("42.00001", "42", True),
        ("42.001", "42", False),
        ("-42", "42", False),
        ("142", "42", False),
        ("4 2", "42", False),
        ("42 43", "42", False),
        ("123456789012345678", "123456789012345678", True),
        ("123456789012345679", "123456789012345678", False),
        ("16777217", "16777216", False),
        ("9" * 40, "9" * 39 + "8", False),
        ("0" * 8 + "9" * 40, "9" * 40, True),
        ("0.5", ".5", True),
        ("0.3333333", "0.33333333", True),
        ("1e3", "1000", False),
        ("", "0", False),
        ("  ", "  ", False),
        ("-", "0", False),
        ("Paris", "Paris", True),
        ("paris", "Paris", False),
        ("Paris, France", "Paris", False),
        ("\xff\x00", "Paris", False),
    ],
)
def test_agreement(given_text, wanted, expected):
    assert agree(given_text, wanted) is expected


def test_case_is_ignored_on_request():
    assert agree("pARIS", "Paris", ignore_case=True) and not agree("Pariz", "Paris", ignore_case=True)


@settings(deadline=None, max_examples=100)
@given(st.integers(-(10**20), 10**20), st.integers(-3, 3), st.sampled_from(["", "+", "00"]))
def test_integers_agree_exactly(number, off, lead):
    lead = lead if number >= 0 else ""
    assert agree(f"{lead}{number}", str(number + off)) is (off == 0)


@settings(deadline=None, max_examples=100)
@given(st.decimals(-(10**6), 10**6, places=4), st.sampled_from([0, Decimal("2e-7"), Decimal("5e-6"), Decimal("-1e-3")]))
def test_decimals_agree_within_the_tolerance(number, relative):
    other = number * (1 + relative)
    expected = number == other or abs(relative) < Decimal("1e-6")
    assert agree(f"{other:f}"[:40], f"{number:f}") is expected


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=48), st.binary(min_size=1, max_size=48))
def test_any_bytes_agree_only_as_text_or_as_numbers(left, right):
    same = left.strip(b" \t\n\r\v\f") == right.strip(b" \t\n\r\v\f") != b""

    def number(raw):
        return set(raw) <= set(b"0123456789+-. \t\n\r\v\f") and any(48 <= c <= 57 for c in raw)

    if not (number(left) and number(right)):
        assert bool(_matches(False)(literal(left, 48), literal(right, 48))) is same


# --- the environment --------------------------------------------------------------------------------------------------


@functools.cache
def environment():
    env = make("tasks", path=str(DATA))
    # The tool compiles to a large program; these tests do not need it fast.
    return env, *(jax.jit(f) for f in (env.reset, env.step, env.expert))


def start(seed=0):
    env, reset, _, _ = environment()
    state, ts = reset(jax.random.key(seed), canonical_params(env.params))
    return state, ts, load_tasks(DATA).rows[int(state.row)]


def act(state, text):
    env, _, step, _ = environment()
    return step(jax.random.key(0), state, literal(text, env.spec.max_action), canonical_params(env.params))


def test_the_prompt_is_the_first_observation_and_rows_are_drawn_evenly():
    _, ts, row = start(3)
    assert to_str(ts.observation) == row.prompt.decode()
    env = environment()[0]
    keys = jax.random.split(jax.random.key(0), 6000)
    drawn = jax.jit(jax.vmap(lambda k: env.reset(k, env.params)[0].row))(keys)
    count = np.bincount(np.asarray(drawn), minlength=300)
    assert count.shape == (300,) and count.min() > 4 and count.max() < 45


def test_the_tool_answers_and_its_errors_are_observations():
    state, _, _ = start()
    for text, reply in [
        ("let me see\ncalc (12+3)*-4 ", "-60"),
        ("calc 999999999*999999999", "999999998000000001"),
        ("calc 999999999*9999999999", "error: overflow"),
        ("calc 1//0", "error: division by zero"),
        ("calc 1+", "error: malformed"),
        ("calc", "error: use calc or answer"),
        ("calc 1+1+1+1+1+1+1+1+1+1", "error: too long"),
        ("calculate 1", "error: use calc or answer"),
        ("", "error: use calc or answer"),
    ]:
        _, ts = act(state, text)
        assert to_str(ts.observation) == reply, text
        assert not ts.terminated and not ts.truncated and float(ts.reward) == 0
        assert float(ts.info["malformed"]) == float("use" in reply or "malformed" in reply or "long" in reply)
        assert float(ts.info["malformed"]) + float(ts.info["tool_calls"]) == 1 and float(ts.info["answered"]) == 0


def test_only_the_answer_command_of_the_last_line_is_paid():
    state, _, row = start()
    right = row.answer.decode()
    for text in (f"answer {right}", f"calc 1+1\nanswer {right}\n\n", f"hmm\n answer  {right}.0"):
        _, ts = act(state, text)
        assert float(ts.reward) == float(ts.info["success"]) == 1 and bool(ts.terminated), text
    for text in (
        f"answer {right}1",
        f"answer {right}\nanswer 0",
        f"answer {right} or 3",
        f"answer -{right}",
        "answer ?",
    ):
        _, ts = act(state, text)
        assert float(ts.reward) == 0 and bool(ts.terminated), text
    for text in (right, f"The answer is {right}", f"answer {right}\nbye", f"answer{right}", "answer", "answer  ", "\0"):
        _, ts = act(state, text)
        assert float(ts.reward) == 0 and not ts.terminated, text


def test_an_episode_is_cut_after_its_turns():
    state, _, _ = start()
    flags = []
    for _ in range(4):
        state, ts = act(state, "calc 1+1")
        flags.append(bool(ts.truncated))
    assert flags == [False, False, False, True] and not ts.terminated


def test_the_expert_calls_then_answers_and_is_wrong_only_by_its_noise():
    env, reset, step, expert = environment()
    params = canonical_params(env.params._replace(teacher_noise=0.0))
    for seed in range(5):
        key = jax.random.key(seed)
        state, _ = reset(key, params)
        row = load_tasks(DATA).rows[int(state.row)]
        call = expert(key, state, params)
        assert to_str(call) == f"calc {row.expression.decode()}"
        state, ts = step(key, state, call, params)
        assert to_str(ts.observation) == row.answer.decode()
        state, ts = step(key, state, expert(key, state, params), params)
        assert float(ts.reward) == 1
    noisy = canonical_params(env.params._replace(teacher_noise=1.0))
    assert to_str(expert(key, state, noisy)).startswith("answer ")


def test_without_an_expression_the_expert_answers_at_once(tmp_path):
    raw = OK + '{"prompt": "Hauptstadt von Österreich?", "answer": "Wien"}'.encode()
    env = make("tasks", path=str(write(tmp_path, raw)), ignore_case=True)
    assert env.spec.max_action == 48 and env.spec.max_observation == len("Hauptstadt von Österreich?".encode())
    params = canonical_params(env.params._replace(teacher_noise=0.0))
    for row, text in ((0, "answer 1"), (1, "answer Wien")):
        state = State(jnp.int32(row), jnp.int32(0))
        assert to_str(jax.jit(env.expert)(jax.random.key(0), state, params)) == text
        assert to_str(jax.jit(env.privileged)(state)) == text[7:]
    assert float(jax.jit(env.step)(jax.random.key(0), state, literal("answer wien", 48), params)[1].reward) == 1


def test_sizes_that_cannot_hold_the_table_are_refused():
    with pytest.raises(ValueError, match=r"max_action 2., got 4 and 8"):
        make("tasks", path=str(DATA), max_action=8)
    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        make("tasks", path=str(DATA), max_turns=0)


def test_the_split_of_a_file():
    env = environment()[0]
    train, test = check_split(env, 0.1)
    assert train + test == 300 and 10 <= test <= 50
    keys = jax.random.split(jax.random.key(1), 2000)
    sides = []
    for split in ("train", "test"):
        side = held_out(env, split)
        state, ts = jax.jit(jax.vmap(side.reset, (0, None)))(keys, canonical_params(side.params))
        assert not np.asarray(ts.info["split_miss"]).any()
        sides.append(set(np.asarray(state.inner.row).tolist()))
    assert not sides[0] & sides[1] and len(sides[1]) == test and len(sides[0]) == train


def test_a_file_too_small_to_split_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="tasks: of 4096 draws, 1 tasks are different"):
        check_split(make("tasks", path=str(write(tmp_path, OK))))
