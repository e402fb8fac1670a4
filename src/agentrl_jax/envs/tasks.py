"""The user's own questions from a JSONL file, with the calculator as a tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import text as tx
from agentrl_jax.envs import tool
from agentrl_jax.envs.base import Environment, EnvSpec
from agentrl_jax.envs.tasks_file import MAX_OPERATORS, Report, Task, Tasks, TasksError, load_tasks
from agentrl_jax.types import Array, PyTree, Text, TimeStep

__all__ = ["Params", "Report", "Task", "Tasks", "TasksError", "load_tasks", "matches", "tasks"]

_ACTION = 48
_TOLERANCE = 1e-6


class Params(NamedTuple):
    """``teacher_noise``: probability that the teacher answers at once with the answer of some row of the table."""

    teacher_noise: float = 0.1


class State(NamedTuple):
    """``row`` of the table and actions so far, ``int32[]``."""

    row: Array
    turn: Array


class _Table(NamedTuple):
    """The texts of the file as NumPy arrays ``[R, C]`` and ``[R]``: constants of the compiled program."""

    prompt: Text
    answer: Text
    expression: Text


def _column(texts: Sequence[bytes]) -> Text:
    capacity = max(1, *map(len, texts))
    data = np.stack([np.frombuffer(text.ljust(capacity, b"\0"), np.uint8) for text in texts])
    return Text(data, np.asarray([len(text) for text in texts], np.int32))  # pyright: ignore[reportArgumentType]


def _row(column: Text, row: Array) -> Text:
    return jax.tree.map(lambda x: jnp.take(x, row, axis=0, mode="clip"), column)


def _integer(text: Text) -> tuple[Text, Array, Array]:
    """``(digits without sign and leading zeros, negative, valid)``, of any length."""
    negative = tx.startswith(text, "-")
    digits = tx.slice_(text, (negative | tx.startswith(text, "+")).astype(jnp.int32), text.length)
    position = jnp.arange(digits.data.shape[0], dtype=jnp.int32)
    inside = position < digits.length
    is_digit = (digits.data >= ord("0")) & (digits.data <= ord("9"))
    first = jnp.min(jnp.where(inside & (digits.data != ord("0")), position, digits.length))
    bare = tx.slice_(digits, first, digits.length)
    return bare, negative & (bare.length > 0), jnp.all(is_digit | ~inside) & (digits.length > 0)


def matches(given: Text, wanted: Text, *, ignore_case: bool = False) -> Array:
    """Whether two answers agree: as text, as integers, or as decimals; ``bool[]``. Empty text never does.

    Surrounding whitespace does not count. Integers are compared exactly, whatever their length (``+007`` is ``7``).
    Where one side has a decimal point, ``|a - b| <= 1e-6 * max(|a|, |b|)`` of the values in float32.
    """
    given, wanted = tx.strip(given), tx.strip(wanted)
    fold = tx.lower if ignore_case else lambda text: text
    same = tx.equal(fold(given), fold(wanted))
    (a, a_negative, a_valid), (b, b_negative, b_valid) = _integer(given), _integer(wanted)
    integers = a_valid & b_valid
    (x, x_valid), (y, y_valid) = tx.parse_decimal(given), tx.parse_decimal(wanted)
    close = jnp.abs(x - y) <= _TOLERANCE * jnp.maximum(jnp.abs(x), jnp.abs(y))
    exact = tx.equal(a, b) & (a_negative == b_negative)
    number = jnp.where(integers, exact, x_valid & y_valid & close)
    return (same | number) & (given.length > 0)


def _step(table: _Table, spec: EnvSpec, ignore_case: bool, state: State, action: Text) -> tuple[State, TimeStep]:
    line = tx.last_line(action)
    given = tx.slice_(line, len(tool.ANSWER), line.length)
    answered = tx.startswith(line, tool.ANSWER) & ~tx.is_blank(given)
    success = answered & matches(given, _row(table.answer, state.row), ignore_case=ignore_case)
    said = tool.reply(line, max_operators=MAX_OPERATORS)
    turn = state.turn + 1
    ts = TimeStep(
        observation=tx.resize(tx.where(answered, tx.empty(1), said.text), spec.max_observation)[0],
        reward=success,
        terminated=answered,
        truncated=~answered & (turn >= spec.max_turns),
        info=tool.outcome(success, answered, said.parses),
    )
    return State(state.row, turn), ts


def _expert(table: _Table, spec: EnvSpec, key: Array, state: State, params: PyTree) -> Text:
    coin, pick = jax.random.split(key)
    noisy = jax.random.bernoulli(coin, jnp.clip(params.teacher_noise, 0.0, 1.0))
    other = jax.random.randint(pick, (), 0, table.answer.length.shape[0])
    expression = _row(table.expression, state.row)
    call, _ = tx.concat(tool.CALL, expression, capacity=spec.max_action)
    answer, _ = tx.concat(tool.ANSWER, _row(table.answer, jnp.where(noisy, other, state.row)), capacity=spec.max_action)
    calls = (state.turn == 0) & (expression.length > 0) & ~noisy
    return tx.where(calls, call, answer)


def tasks(path: str, max_turns: int = 4, max_action: int | None = None, ignore_case: bool = False) -> Environment:
    """Questions from ``path`` (see ``load_tasks``), one drawn uniformly at reset; the first observation is the prompt.

    An action's last line is ``calc EXPR``, answered by the value or ``error: ...``, or ``answer TEXT``, which ends the
    episode with reward 1 when it ``matches`` the row's answer and 0 otherwise. What stands outside that command never
    counts. Any other text, an empty answer too, is answered by an error and costs a turn. Cut after ``max_turns``. The
    expert calls the row's expression, where it has one, then answers. The table becomes constants of the compiled
    program, and its longest rows set the sizes: ``max_action`` holds them and at least 48 bytes. Split it with
    ``held_out``, after ``check_split``.

    Raises:
      TasksError: see ``load_tasks``.
      ValueError: ``max_turns`` below 1, or ``max_action`` below what the longest answer and expression need.
    """
    rows = load_tasks(path).rows
    table = _Table(*(_column(texts) for texts in list(zip(*rows, strict=True))[:3]))
    longest = [column.data.shape[1] for column in table]
    needed = max(len(tool.ANSWER) + longest[1], len(tool.CALL) + longest[2])
    size = max(_ACTION, needed) if max_action is None else max_action
    if size < needed or max_turns < 1:
        raise ValueError(
            f"tasks {path}: max_turns must be at least 1 and max_action {needed}, got {max_turns} and {max_action}"
        )
    spec = EnvSpec(max(longest[0], tool.REPLY), size, max_turns, info=tool.INFO)

    def reset(key, params):
        row = jax.random.randint(key, (), 0, len(rows))
        prompt = tx.resize(_row(table.prompt, row), spec.max_observation)[0]
        return State(row, jnp.int32(0)), TimeStep(observation=prompt)

    return Environment(
        name="tasks",
        version="1",
        spec=spec,
        params=Params(),
        reset=reset,
        step=lambda key, state, action, params: _step(table, spec, ignore_case, state, action),
        expert=lambda key, state, params: _expert(table, spec, key, state, params),
        privileged=lambda state: _row(table.answer, state.row),
    )
