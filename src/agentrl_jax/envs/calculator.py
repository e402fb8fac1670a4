"""Integer arithmetic with a calculator tool: ``12*(34+5)=?``, a call, an answer.

The last line of an action that is not blank is its command; what stands before it is reasoning, without effect.

- ``calc EXPR`` calls the tool; the observation is the result or ``error: ...``.
- ``answer INT`` ends the episode: reward 1 for the exact value, else 0.
- Anything else is answered by an error, and the episode goes on.

Values are exact up to 18 digits. A question is drawn again when it divides by zero or passes 18 digits on the way; when
seven draws in a row do, it becomes the difference of the first two numbers of an eighth, which cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from agentrl_jax import bigint, control
from agentrl_jax import text as tx
from agentrl_jax.bigint import BigInt
from agentrl_jax.checks import known
from agentrl_jax.envs import tool
from agentrl_jax.envs.base import Environment, EnvSpec, canonical
from agentrl_jax.expression import Status, evaluate
from agentrl_jax.types import Array, Text, TimeStep

_OPERATORS = (b"+", b"-", b"*", b"//", b"%")
_SUB = 1
_WEIGHTS = ("add", "sub", "mul", "floordiv", "mod")
_TRIES = 8
_ASK = b"=?"


class CalculatorParams(NamedTuple):
    """Difficulty, costs and the teacher's faults; traced. Numbers above the environment's capacities count as these.

    Attributes:
      min_digits, max_digits: digits of an operand, uniform; its first digit is not 0.
      min_operators, max_operators: operators of a question, uniform.
      max_depth: nested parentheses, uniform from 0, as far as there are operands for them.
      add, sub, mul, floordiv, mod: weights of the operators; not all zero (that counts as ``add`` alone).
      call_cost: taken from the reward of a well-formed tool call.
      error_cost: taken from the reward of an action answered by an error.
      teacher_wrong: probability that the expert's first call has a wrong digit (its answer then follows the tool).
      teacher_guess: probability that the expert answers at once, with a random number as long as the answer.
    """

    min_digits: int = 2
    max_digits: int = 3
    min_operators: int = 1
    max_operators: int = 2
    max_depth: int = 1
    add: float = 1.0
    sub: float = 1.0
    mul: float = 1.0
    floordiv: float = 0.0
    mod: float = 0.0
    call_cost: float = 0.0
    error_cost: float = 0.0
    teacher_wrong: float = 0.2
    teacher_guess: float = 0.2


class CalculatorState(NamedTuple):
    """An episode.

    Attributes:
      question: ``Text``, as the agent saw it.
      answer: the exact value.
      observation: ``Text``, the last one; the question at first.
      has_result: ``bool[]``, the last observation is a result of the tool.
      turns: ``int32[]``, actions taken.
    """

    question: Text
    answer: BigInt
    observation: Text
    has_result: Array
    turns: Array


class _Sizes(NamedTuple):
    turns: int
    operators: int
    digits: int
    depth: int
    action: int

    @property
    def expression(self) -> int:
        return (self.operators + 1) * self.digits + 2 * self.operators + 2 * self.depth

    @property
    def observation(self) -> int:
        return max(self.expression + len(_ASK), tool.REPLY)

    @property
    def evaluated(self) -> int:
        return max(8, 2 * self.operators)


class _Draw(NamedTuple):
    """A question before it is written: per operand ``[P]``, its digits, the operator behind it and its parentheses."""

    operators: Array
    digits: Array  # int32[P, D]
    length: Array
    operator: Array
    opened: Array
    closed: Array


def calculator(
    *,
    max_turns: int = 4,
    max_operators: int = 3,
    max_digits: int = 4,
    max_depth: int = 2,
    max_action: int = 48,
    params: CalculatorParams | None = None,
) -> Environment:
    """Builds the environment; capacities are static, difficulty (``params``) is traced and held within them.

    Info: ``success``, ``answered``, ``tool_calls`` (1 for a call whose expression parses), ``malformed`` (1 for an
    action that is no valid command). An episode that is not answered in ``max_turns`` actions is truncated.

    Raises:
      ValueError: a capacity out of range, too small for the others, or below what ``params`` asks for; a number of
        ``params`` out of range (a traced one cannot be looked at).
    """
    sizes = _Sizes(max_turns, max_operators, max_digits, max_depth, max_action)
    params = _default_params(sizes) if params is None else params
    _check(sizes, params)

    def reset(key: Array, p: CalculatorParams) -> tuple[CalculatorState, TimeStep]:
        question, answer = _new_question(key, p, sizes)
        observation = tx.resize(question, sizes.observation)[0]
        state = CalculatorState(question, answer, observation, jnp.asarray(False), jnp.int32(0))
        return state, canonical(TimeStep(observation=observation), spec)

    def step(key: Array, state: CalculatorState, action: Text, p: CalculatorParams) -> tuple[CalculatorState, TimeStep]:
        del key
        state, timestep = _step(state, action, p, sizes)
        return state, canonical(timestep, spec)

    spec = EnvSpec(max_observation=sizes.observation, max_action=max_action, max_turns=max_turns, info=tool.INFO)
    return Environment(
        name="calculator",
        version="1",
        spec=spec,
        params=params,
        reset=reset,
        step=step,
        expert=lambda key, state, p: _expert(key, state, p, sizes),
        anchor=lambda state: tx.hash_(
            tx.concat(state.question, b"\n", state.observation, capacity=2 * sizes.observation + 1)[0]
        ),
        privileged=lambda state: bigint.to_text(state.answer),
    )


def _default_params(sizes: _Sizes) -> CalculatorParams:
    """The defaults, within the capacities."""
    p = CalculatorParams()
    return p._replace(
        min_digits=min(p.min_digits, sizes.digits),
        max_digits=min(p.max_digits, sizes.digits),
        max_operators=min(p.max_operators, sizes.operators),
        max_depth=min(p.max_depth, sizes.depth),
    )


def _check(sizes: _Sizes, params: CalculatorParams) -> None:
    allowed = {"turns": (1, 2**31 - 1), "operators": (1, 64), "digits": (1, bigint.MAX_DIGITS), "depth": (0, 8)}
    for name, (low, high) in allowed.items():
        value = getattr(sizes, name)
        if not (isinstance(value, int) and low <= value <= high):
            raise ValueError(f"calculator: max_{name} must be an int from {low} to {high}, got {value!r}")
    needed = max(len(tool.CALL) + sizes.expression, len(tool.ANSWER) + bigint.CAPACITY)
    if not (isinstance(sizes.action, int) and sizes.action >= needed):
        raise ValueError(f"calculator: max_action must hold a call of {needed} bytes, got {sizes.action!r}")
    for name in ("operators", "digits", "depth"):
        _check_range(name, params, getattr(sizes, name))
    for name in ("teacher_wrong", "teacher_guess", *_WEIGHTS, "call_cost", "error_cost"):
        value = getattr(params, name)
        high = 1.0 if name.startswith("teacher") else np.inf
        low = -np.inf if name.endswith("cost") else 0.0
        if known(value) and not (np.isfinite(value) and low <= value <= high):
            raise ValueError(f"calculator: params.{name} must be a finite number in [{low:g}, {high:g}], got {value}")


def _check_range(name: str, params: CalculatorParams, held: int) -> None:
    """``least <= min <= max <= capacity``, of the numbers that can be looked at."""
    high, least = getattr(params, f"max_{name}"), 0 if name == "depth" else 1
    low = getattr(params, f"min_{name}", least)
    if known(high) and high > held:
        raise ValueError(f"calculator: params.max_{name}={high} exceeds the capacity max_{name}={held}")
    if known(low) and low < least:
        raise ValueError(f"calculator: params.min_{name} must be at least {least}, got {low}")
    if known(low) and known(high) and low > high:
        raise ValueError(f"calculator: params.max_{name} must be at least {low}, got {high}")


def _between(u: Array, low: ArrayLike, high: ArrayLike) -> Array:
    """Uniform integer in ``[low, high]`` from a uniform ``u`` in [0, 1); ``low`` when the range is empty."""
    low = jnp.asarray(low, jnp.int32)
    span = jnp.maximum(high - low, 0) + 1
    return low + jnp.minimum(jnp.floor(u * span).astype(jnp.int32), span - 1)


def _between_held(u: Array, low: ArrayLike, high: ArrayLike, held: int) -> Array:
    """The same with both ends held within ``[1, held]``."""
    return _between(u, jnp.clip(low, 1, held), jnp.clip(high, 1, held))


def _new_question(key: Array, p: CalculatorParams, sizes: _Sizes) -> tuple[Text, BigInt]:
    """A question with a value of at most 18 digits, and the value; a row's draws do not depend on its batch mates."""

    def attempt(carry: tuple) -> tuple:
        tried, settled = carry[0], carry[3] == Status.OK
        draw = _draw(jax.random.fold_in(key, tried), p, sizes)
        plain = draw._replace(operators=1, operator=_SUB, opened=0, closed=0)
        draw = jax.tree.map(lambda simple, x: jnp.where(tried == _TRIES - 1, simple, x), plain, draw)
        expression = _write(draw, sizes)
        found = evaluate(expression, max_operators=sizes.evaluated)
        new = (tried + 1, expression, found.value, found.status)
        return jax.tree.map(lambda old, x: jnp.where(settled, old, x), carry, new)

    nothing = jax.tree.map(jnp.asarray, (tx.empty(sizes.expression), bigint.from_int(0)))
    carry = (jnp.int32(0), *nothing, jnp.int32(Status.MALFORMED))
    _, expression, answer, _ = control.while_any(lambda c: (c[3] != Status.OK) & (c[0] < _TRIES), attempt, carry)
    return tx.concat(expression, _ASK, capacity=sizes.expression + len(_ASK))[0], answer


def _draw(key: Array, p: CalculatorParams, sizes: _Sizes) -> _Draw:
    operands = sizes.operators + 1
    # One draw for everything: a call of the generator costs more than the numbers it returns.
    u = jax.random.uniform(key, (2 + operands * (2 + sizes.digits) + 2 * sizes.depth,))
    head, rest = u[:2], u[2:]
    table, spans = rest[: operands * (2 + sizes.digits)].reshape(operands, -1), rest[operands * (2 + sizes.digits) :]
    operators = _between_held(head[0], p.min_operators, p.max_operators, sizes.operators)
    depth = _between(head[1], 0, jnp.clip(p.max_depth, 0, sizes.depth))
    first = np.arange(sizes.digits) == 0
    digits = _between(table[:, 2:], np.where(first, 1, 0), np.full(sizes.digits, 9))
    length = _between_held(table[:, 0], p.min_digits, p.max_digits, sizes.digits)
    opened, closed = _parentheses(spans, operators, depth, sizes)
    return _Draw(operators, digits, length, _pick_operator(table[:, 1], p), opened, closed)


def _pick_operator(u: Array, p: CalculatorParams) -> Array:
    weight = jnp.maximum(jnp.stack([getattr(p, name) for name in _WEIGHTS]).astype(jnp.float32), 0.0)
    upto = jnp.cumsum(weight)
    index = jnp.sum(upto <= (u * upto[-1])[..., None], axis=-1, dtype=jnp.int32)
    # Rounding may carry u * total to the total itself: never to an operator of weight 0.
    last = jnp.max(jnp.where(weight > 0, jnp.arange(len(_OPERATORS), dtype=jnp.int32), 0))
    return jnp.minimum(index, last)


def _parentheses(u: Array, operators: Array, depth: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Nested spans of at least two operands, each a proper part of the one around it: marks per operand."""
    operand = jnp.arange(sizes.operators + 1, dtype=jnp.int32)
    opened = closed = jnp.zeros_like(operand)
    low, high = jnp.int32(0), operators
    for level in range(sizes.depth):
        active = (level < depth) & (high - low >= 2)
        size = _between(u[2 * level], 2, high - low)
        start = _between(u[2 * level + 1], low, high + 1 - size)
        low, high = jnp.where(active, start, low), jnp.where(active, start + size - 1, high)
        opened = opened + (active & (operand == low))
        closed = closed + (active & (operand == high))
    return opened, closed


def _write(draw: _Draw, sizes: _Sizes) -> Text:
    """Lays every operand out at full width, ``((dddd))op``, and keeps the bytes that are there."""
    operands = sizes.operators + 1
    names = np.asarray([list(name.ljust(2, b"\0")) for name in _OPERATORS], np.int32)
    marks = np.arange(sizes.depth)
    operator = jnp.take(names, draw.operator, axis=0, mode="clip")
    index = jnp.arange(operands, dtype=jnp.int32)[:, None]
    opening = jnp.full((operands, sizes.depth), ord("("), jnp.int32)
    layout = jnp.concatenate([opening, draw.digits + ord("0"), opening + 1, operator], axis=1)
    keep = jnp.concatenate(
        [
            marks < draw.opened[:, None],
            np.arange(sizes.digits) < draw.length[:, None],
            marks < draw.closed[:, None],
            (operator > 0) & (index < draw.operators),
        ],
        axis=1,
    )
    keep = keep & (index <= draw.operators)
    return tx.compact(layout.reshape(-1), keep.reshape(-1), sizes.expression)[0]


def _step(state: CalculatorState, action: Text, p: CalculatorParams, sizes: _Sizes) -> tuple[CalculatorState, TimeStep]:
    line = tx.last_line(action)
    said = tool.reply(line, max_operators=sizes.evaluated)
    number, valid, long_number = bigint.parse(tx.slice_(line, len(tool.ANSWER), line.length))
    answered = tx.startswith(line, tool.ANSWER) & (valid | long_number)
    success = answered & valid & bigint.equal(number, state.answer)
    error = ~said.has_result & ~answered
    observation = tx.resize(tx.where(answered, tx.empty(1), said.text), sizes.observation)[0]
    turns = state.turns + 1
    state = state._replace(observation=observation, has_result=said.has_result, turns=turns)
    return state, TimeStep(
        observation=observation,
        reward=success - p.call_cost * said.parses - p.error_cost * error,
        terminated=answered,
        truncated=~answered & (turns >= sizes.turns),
        info=tool.outcome(success, answered, said.parses),
    )


def _expert(key: Array, state: CalculatorState, p: CalculatorParams, sizes: _Sizes) -> Text:
    """First a call (a guess, a call with a wrong digit); then the tool's result; after an error the right call."""
    u = jax.random.uniform(key, (4 + bigint.MAX_DIGITS,))
    first = state.turns == 0
    guesses, wrong = first & (u[0] < p.teacher_guess), first & (u[1] < p.teacher_wrong)
    expression = tx.slice_(state.question, 0, state.question.length - len(_ASK), sizes.expression)
    called = tx.where(wrong, _spoil(expression, u[2], u[3]), expression)
    answers = guesses | state.has_result
    said = tx.where(guesses, _guess(state.answer, u[4:]), state.observation)
    verb = tx.where(answers, tool.ANSWER, tool.CALL)
    return tx.concat(verb, tx.where(answers, said, called), capacity=sizes.action)[0]


def _spoil(expression: Text, u_place: Array, u_digit: Array) -> Text:
    """One digit replaced by another that is not 0, so that the call stays well formed."""
    data, length = tx.widen(expression)
    digit = data - ord("0")
    is_digit = (digit >= 0) & (digit <= 9)
    rank = jnp.cumsum(is_digit.astype(jnp.int32))
    hit = is_digit & (rank == _between(u_place, 1, rank[-1]))
    other = 1 + (digit - 1 + _between(u_digit, 1, 8)) % 9
    return Text(jnp.where(hit, ord("0") + other, data).astype(jnp.uint8), length)


def _guess(answer: BigInt, u: Array) -> Text:
    """A random number with as many digits as the answer."""
    lowest = np.where(np.arange(bigint.MAX_DIGITS) == 0, 1, 0)
    digits = _between(u, lowest, np.full(bigint.MAX_DIGITS, 9))
    count = bigint.to_text(answer).length - (bigint.sign(answer) < 0)
    return tx.slice_(Text(digits + ord("0"), jnp.int32(bigint.MAX_DIGITS)), 0, count)
