"""Expressions against Python: exact values, every status, any bytes."""

import ast
import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_jax import bigint as bi
from agentrl_jax import text as tx
from agentrl_jax.expression import Evaluation, Status, evaluate
from agentrl_jax.types import Text

C, OPERATORS, LIMIT = 64, 8, 10**18
many = settings(deadline=None, max_examples=300)


@functools.cache
def evaluator():
    return jax.jit(lambda t: evaluate(t, max_operators=OPERATORS))


def outcome(out: Evaluation) -> tuple[Status, int]:
    assert np.asarray(out.status).dtype == np.int32
    return Status(int(out.status)), bi.to_int(out.value)


def run(s: str | bytes) -> tuple[Status, int]:
    return outcome(evaluator()(tx.literal(s, C)))


class Failure(Exception):
    pass


def reference(tree: ast.AST) -> int:
    """Python's value, or the first failure from left to right under the 18-digit rule."""
    match tree:
        case ast.Constant(value=int(n)):
            return n
        case ast.UnaryOp(op=op, operand=x):
            return -reference(x) if isinstance(op, ast.USub) else reference(x)
        case ast.BinOp(left=x, op=op, right=y):
            a, b = reference(x), reference(y)
            if isinstance(op, ast.FloorDiv | ast.Mod) and b == 0:
                raise Failure(Status.DIVIDE_BY_ZERO)
            operation = {
                ast.Add: int.__add__,
                ast.Sub: int.__sub__,
                ast.Mult: int.__mul__,
                ast.FloorDiv: int.__floordiv__,
            }
            value = operation.get(type(op), int.__mod__)(a, b)
            if abs(value) >= LIMIT:
                raise Failure(Status.OVERFLOW)
            return value
    raise AssertionError(ast.dump(tree))


def expected(s: str) -> tuple[Status, int]:
    tree = ast.parse(s.strip(" \t"), mode="eval").body
    operators = sum(isinstance(n, ast.BinOp | ast.UnaryOp) for n in ast.walk(tree))
    if operators > OPERATORS:
        return Status.TOO_LONG, 0
    if any(isinstance(n, ast.Constant) and n.value >= LIMIT for n in ast.walk(tree)):
        return Status.OVERFLOW, 0
    try:
        return Status.OK, reference(tree)
    except Failure as failure:
        return failure.args[0], 0


LITERAL = st.one_of(
    st.integers(0, 20), st.integers(0, 10**9), st.integers(0, 10**18 - 1), st.integers(0, 10**19), st.just(0)
).map(str)
GAP = st.sampled_from(["", "", "", " ", "\t"])


def _grow(inner):
    binary = st.tuples(inner, GAP, st.sampled_from(["+", "-", "*", "//", "%"]), GAP, inner).map("".join)
    unary = st.tuples(st.sampled_from(["-", "+"]), GAP, inner).map("".join)
    nested = st.tuples(st.just("("), GAP, inner, GAP, st.just(")")).map("".join)
    return st.one_of(binary, binary, unary, nested)


EXPRESSION = st.recursive(LITERAL, _grow, max_leaves=7).filter(lambda s: len(s) <= C)


@settings(deadline=None, max_examples=600)
@given(EXPRESSION)
@example("12*(34+5)")
@example("8-3-2")
@example("-7//2")
@example("7%-3")
@example("- -+4*-2")
@example("1//0+9999999999999999999")
@example("999999999999999999+1-1")
@example("1//(5-5)")
@example("999999999*999999999")
@example("(((((((((((((((1)))))))))))))))")
@example("-999999999999999999//1000000007%-998")
def test_agrees_with_python(s):
    assert run(s) == expected(s)


def test_golden():
    assert run("12*(34+5)") == (Status.OK, 468)
    assert run(" ( 2 + 3 ) * -4 // 3 ") == (Status.OK, -7)
    assert run("999999999*999999999") == (Status.OK, 999999998000000001)
    assert run("1+" * 8 + "1") == (Status.OK, 9)
    assert run("1+" * 9 + "1") == (Status.TOO_LONG, 0)
    assert run("000") == (Status.OK, 0)


MALFORMED = (
    "", " ", "1 2", "1+", "*1", "()", "(1", "1)", ")1(", "1/2", "1///2", "1/ /2", "1////2", "2**3",
    "2* *3", "012", "1+00001", "5(3)", "(3)5", "(1)(2)", "1,2", "1.5", "x", "1\n+2", "\n1", "1\x00", "1_0",
    "0x1", "1e3", "--", "(-)", "1+()", "//", "1//", "+" * 60, "(" * 60, "1" + ")" * 60, "\xff",
)  # fmt: skip


@pytest.mark.parametrize("s", MALFORMED)
def test_malformed(s):
    assert run(s.encode("latin-1")) == (Status.MALFORMED, 0)


def accepted_by_python(raw: bytes) -> bool:
    try:
        tree = ast.parse(raw.decode("ascii").strip(" \t"), mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        return False
    return all(
        isinstance(n, ast.Expression | ast.BinOp | ast.UnaryOp | ast.Constant | ast.operator | ast.unaryop)
        for n in ast.walk(tree)
    )


SOUP = st.lists(
    st.sampled_from([b"1", b"0", b"23", b"+", b"-", b"*", b"/", b"//", b"%", b"(", b")", b" ", b"\t", b"a", b"\n"]),
    max_size=14,
)


@many
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(st.one_of(SOUP.map(b"".join), st.binary(max_size=C)))
def test_garbage_is_malformed_unless_python_accepts_it(raw):
    status, value = run(raw)
    if status == Status.MALFORMED:
        # What Python accepts and this grammar refuses: powers, true division, inversion, line breaks, other spellings.
        odd = any(c in raw for c in b"\n\r\f~_.xXoObBeEjJ\x00'\"#")
        assert not accepted_by_python(raw) or odd or b"**" in raw or _true_division(raw)
    else:
        assert accepted_by_python(raw)
        assert (status, value) == expected(raw.decode())


def _true_division(raw: bytes) -> bool:
    tree = ast.parse(raw.decode().strip(" \t"), mode="eval")
    return any(isinstance(n, ast.Div) for n in ast.walk(tree))


def test_batch_mates_do_not_matter():
    strings = ["1+2", "7//0", "9*9*9*9*9*9", "", "100//7%4", "-(5)", "999999999999999999*9", "3+", "12//(3-5)"]
    batch = Text(np.stack([tx.literal(s, C).data for s in strings]), np.asarray([len(s) for s in strings], np.int32))
    out = jax.jit(jax.vmap(lambda t: evaluate(t, max_operators=OPERATORS)))(batch)
    for i, s in enumerate(strings):
        alone = evaluator()(tx.literal(s, C))
        assert outcome(Evaluation(bi.BigInt(out.value.limbs[i]), out.status[i])) == outcome(alone)


def test_control_flow_stays_scalar_under_vmap():
    batch = Text(np.zeros((3, 16), np.uint8), np.zeros(3, np.int32))
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda t: evaluate(t)))(batch))
    assert "cond[" in jaxpr and "while[" in jaxpr  # a batched predicate would have turned them into selects
