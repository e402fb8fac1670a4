"""Integer expressions evaluated inside XLA: bytes in, an exact value or a status out, never an exception.

Grammar: decimal integers, ``+ - * // %``, unary ``+`` and ``-``, parentheses, spaces and tabs, with Python's precedence
and floor semantics. Every accepted string is a Python expression of the same value. Parsing has no loop over bytes: in
this grammar a string is well formed when neighbouring tokens fit and the parentheses balance, and an operator's place
in reverse Polish order follows from the next operator that does not bind tighter. The evaluation loop runs once per
operator of the longest expression in the batch. Work is quadratic in the capacity of the text.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from agentrl_jax import bigint, control
from agentrl_jax import text as tx
from agentrl_jax.bigint import BigInt
from agentrl_jax.types import Array

_ADD, _SUB, _MUL, _FLOORDIV, _MOD, _NEGATIVE, _POSITIVE = range(7)


class Status(IntEnum):
    """Outcome of ``evaluate``."""

    OK = 0
    MALFORMED = 1
    DIVIDE_BY_ZERO = 2
    OVERFLOW = 3
    TOO_LONG = 4


class Evaluation(NamedTuple):
    """``value``: the result, 0 unless ``status`` is ``Status.OK``; ``status``: ``int32[]``."""

    value: BigInt
    status: Array


class _Tokens(NamedTuple):
    """Per byte: digits, first digits of numbers, operators with their code, parenthesis depth; and the verdict."""

    digit: Array
    first: Array
    operator: Array
    code: Array
    depth: Array
    numbers: Array  # numbers that begin at or before this byte
    operators: Array  # operators at or before this byte
    well_formed: Array


class _Program(NamedTuple):
    """Operators ``[Q]`` in the order of evaluation, and the slots of their operands; the result goes to ``right``."""

    code: Array
    left: Array
    right: Array


def evaluate(text: tx.Pattern, *, max_operators: int = 8) -> Evaluation:
    """Value of an expression with at most ``max_operators`` operators, unary ones included.

    The first error in the order of evaluation is reported; before any evaluation come ``MALFORMED``, ``TOO_LONG`` (more
    operators) and ``OVERFLOW`` of a number of more than 18 digits. ``OVERFLOW``: an intermediate result has more.
    Under ``vmap`` the loop takes as many turns as the row with most operators, and pays for division only in turns in
    which some row divides.
    """
    data, length = tx.widen(text)
    tokens = _tokenise(data, length)
    values, sane, small = _numbers(data, tokens, max_operators + 1)
    count, numbers = tokens.operators[-1], tokens.numbers[-1]
    program = _order(tokens, max_operators)
    checks = [(tokens.well_formed & sane, Status.MALFORMED), (count <= max_operators, Status.TOO_LONG)]
    status = jnp.int32(Status.OK)
    for good, failure in reversed([*checks, (small, Status.OVERFLOW)]):
        status = jnp.where(good, status, jnp.int32(failure))
    turns = control.max_(jnp.where(status == Status.OK, count, 0))
    values, status = lax.fori_loop(0, turns, lambda n, c: _apply(program, n, count, *c), (values, status))
    value = jnp.take(values, numbers - 1, axis=0, mode="clip")
    return Evaluation(BigInt(jnp.where(status == Status.OK, value, 0)), status)


def _shift(x: Array, by: int) -> Array:
    """``x`` moved ``by`` places to the right, zero where nothing comes in."""
    return jnp.pad(x, (by, 0))[: x.shape[0]] if by > 0 else jnp.pad(x, (0, -by))[-by:]


def _prefix_sums(*rows: Array) -> Array:
    """Inclusive prefix sums ``int32[k, C]`` of small integers: one product with a triangle, exact in float32."""
    stacked = jnp.stack(rows).astype(jnp.float32)
    triangle = np.triu(np.ones((stacked.shape[1],) * 2, np.float32))
    return jnp.matmul(stacked, triangle, precision=lax.Precision.HIGHEST).astype(jnp.int32)


def _tokenise(data: Array, length: Array) -> _Tokens:
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    inside = position < length
    char = {c: inside & (data == ord(c)) for c in " \t+-*/%()"}
    digit = inside & (data >= ord("0")) & (data <= ord("9"))
    slash, opening, closing = char["/"], char["("], char[")"]
    # The second slash of a pair is the operator and the first is skipped, like a space.
    floordiv = slash & _shift(slash, 1)
    sign, factor = char["+"] | char["-"], char["*"] | char["%"] | floordiv
    solid = inside & ~(char[" "] | char["\t"] | (slash & ~floordiv))
    ends_operand = digit | closing
    # The nearest solid byte before each byte, with its kind in the lowest bit: 0 at the start, as after an operator.
    tagged = jnp.where(solid, 2 * position + 2 + ends_operand, 0)
    after_operand = jnp.max(jnp.where(position[:, None] > position, tagged, 0), axis=1) % 2 == 1
    first = digit & ~_shift(digit, 1)
    numbers, operators, depth = _prefix_sums(first, sign | factor, opening.astype(jnp.int32) - closing)
    lone_slash = (slash & ~floordiv & ~_shift(slash, -1)) | (floordiv & _shift(slash, -1))
    misplaced = jnp.where(first | opening, after_operand, (factor | closing) & ~after_operand)
    unknown = solid & ~(digit | sign | factor | opening | closing)
    bad = unknown | lone_slash | misplaced | (depth < 0)
    well_formed = ~jnp.any(bad) & (depth[-1] == 0) & (jnp.max(tagged) % 2 == 1)
    named = [char["+"], char["-"], char["*"], floordiv, char["%"]]
    code = sum(k * x.astype(jnp.int32) for k, x in enumerate(named)) + 0 * position
    code = jnp.where(sign & ~after_operand, jnp.where(char["-"], _NEGATIVE, _POSITIVE), code)
    return _Tokens(digit, first, sign | factor, code, depth, numbers, operators, well_formed)


def _collect(member: Array, index: Array, columns: Array, size: int) -> Array:
    """``int32[size, k]``: sums of ``columns [C, k]`` over the members with each index; exact below 2**24."""
    chosen = member & (index == np.arange(size, dtype=np.int32)[:, None])
    dot = jnp.matmul(chosen.astype(jnp.float32), columns.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return dot.astype(jnp.int32)


def _numbers(data: Array, tokens: _Tokens, size: int) -> tuple[Array, Array, Array]:
    """``(limbs int32[size, 5], sane, small)``: the numbers; no leading zeros; none of more than 18 digits."""
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    ahead = (position >= position[:, None]) & ~tokens.digit
    place = jnp.min(jnp.where(ahead, position, data.shape[0]), axis=1) - 1 - position
    value = jnp.where(tokens.digit, data - ord("0"), 0)
    too_high = (value > 0) & (place >= bigint.MAX_DIGITS)
    leading_zero = tokens.first & (value == 0)
    limbs = bigint.place_limbs(value, jnp.maximum(place, 0))
    columns = jnp.concatenate([limbs, leading_zero[:, None], (value > 0)[:, None]], axis=1)
    out = _collect(tokens.digit, tokens.numbers - 1, columns, size)
    padded = (out[:, bigint.LIMBS] > 0) & (out[:, bigint.LIMBS + 1] > 0)
    return out[:, : bigint.LIMBS], ~jnp.any(padded), ~jnp.any(too_high)


def _order(tokens: _Tokens, size: int) -> _Program:
    """Reverse Polish order by comparison of all pairs of operators.

    An operator is applied when the next binary operator comes that does not bind tighter (parentheses and precedence
    in one key), or at the end; among those applied at the same moment, the later first. Then its right operand is
    one value in the slot of its last number, and its left operand one in the slot of the number before it.
    """
    unary = tokens.code >= _NEGATIVE
    precedence = jnp.where(unary, 3, jnp.where(tokens.code >= _MUL, 2, 1))
    columns = jnp.stack([tokens.code, 4 * tokens.depth + precedence, tokens.numbers], axis=1)
    code, key, before = _collect(tokens.operator, tokens.operators - 1, columns, size).T
    index = np.arange(size, dtype=np.int32)
    exists = index < tokens.operators[-1]
    binary = exists & (code < _NEGATIVE)
    ends = binary & (index > index[:, None]) & (key <= key[:, None])
    moment = jnp.min(jnp.where(ends, index, size), axis=1)
    right = jnp.min(jnp.where(ends, before, tokens.numbers[-1]), axis=1) - 1
    rank_key = jnp.where(exists, (moment + 1) * size - index, size * (size + 2))
    rank = jnp.sum(rank_key < rank_key[:, None], axis=1, dtype=jnp.int32)
    chosen = exists & (rank == index[:, None])
    pick = [jnp.sum(jnp.where(chosen, x, 0), axis=1, dtype=jnp.int32) for x in (code, before - 1, right)]
    return _Program(pick[0], jnp.clip(pick[1], 0, size), jnp.clip(pick[2], 0, size))


def _apply(program: _Program, n: Array, count: Array, values: Array, status: Array) -> tuple[Array, Array]:
    """Applies operator ``n`` where the row has one and no error yet."""
    code, left, right = program.code[n], program.left[n], program.right[n]
    active = (status == Status.OK) & (n < count)
    a, b = BigInt(values[left]), BigInt(values[right])
    first = jnp.where(code >= _NEGATIVE, 0, a.limbs)
    total = first + jnp.where((code == _SUB) | (code == _NEGATIVE), -b.limbs, b.limbs)
    columns = bigint.product_columns(a, b)
    columns = jnp.where(code == _MUL, columns, jnp.pad(total, (0, columns.shape[0] - total.shape[0])))
    result, over = bigint.settle(columns)
    divides = (code == _FLOORDIV) | (code == _MOD)
    quotient, remainder, by_zero = lax.cond(
        control.any_(active & divides), bigint.divmod_, lambda x, y: (x, y, jnp.zeros_like(x.limbs[0], bool)), a, b
    )
    limbs = jnp.where(code == _FLOORDIV, quotient.limbs, jnp.where(code == _MOD, remainder.limbs, result.limbs))
    over_or_ok = jnp.where(over & ~divides, Status.OVERFLOW, Status.OK)
    failure = jnp.where(divides & by_zero, Status.DIVIDE_BY_ZERO, over_or_ok)
    slot = jnp.arange(values.shape[0], dtype=jnp.int32) == right
    values = jnp.where((slot & active)[:, None], limbs, values)
    return values, jnp.where(active, failure.astype(jnp.int32), status)
