"""Exact integers against Python's, over the full range and adversarial limbs."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_jax import bigint as bi
from agentrl_jax import text as tx

LIMIT = 10**18
many = settings(deadline=None, max_examples=300)

LIMB = st.sampled_from([0, 0, 1, 2, 4999, 5000, 5001, 9998, 9999])
PATTERN = st.tuples(LIMB, LIMB, LIMB, LIMB, st.sampled_from([0, 0, 1, 50, 98, 99])).map(
    lambda limbs: sum(x * 10 ** (4 * i) for i, x in enumerate(limbs))
)
MAGNITUDE = st.one_of(
    PATTERN, st.integers(0, LIMIT - 1), st.integers(0, 18).flatmap(lambda d: st.integers(0, 10**d - 1))
)
NUMBER = st.tuples(MAGNITUDE, st.sampled_from([1, -1])).map(lambda x: x[0] * x[1])


@functools.cache
def everything():
    def run(a, b):
        return {
            "add": bi.add(a, b),
            "sub": bi.sub(a, b),
            "mul": bi.mul(a, b),
            "floordiv": bi.floordiv(a, b),
            "mod": bi.mod(a, b),
            "compare": bi.compare(a, b),
            "equal": bi.equal(a, b),
            "negate": bi.negate(a),
            "sign": bi.sign(a),
            "text": bi.to_text(a),
        }

    return jax.jit(run)


def whole(x: bi.BigInt) -> int:
    """The value, after its form is checked: five limbs below the base, all of one sign."""
    limbs = np.asarray(x.limbs)
    assert limbs.shape == (5,) and limbs.dtype == np.int32 and np.all(np.abs(limbs) < 10**4)
    assert np.all(limbs >= 0) or np.all(limbs <= 0)
    return bi.to_int(x)


@many
@given(NUMBER, NUMBER)
@example(LIMIT - 1, 1)
@example(-(LIMIT - 1), 1)
@example(999999999, -999999999)
@example(10**9, 10**9)
@example(-7, 2)
@example(7, -2)
@example(0, 0)
@example(LIMIT - 1, 99990000)
@example(99989999_0000_0000_00, 9999_0000_0001)
@example(LIMIT - 1, LIMIT - 1)
@example(LIMIT - 2, LIMIT - 1)
@example(1 - LIMIT, 1)
def test_arithmetic(a, b):
    out = everything()(bi.from_int(a), bi.from_int(b))
    for name, exact in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        result, overflow = out[name]
        assert bool(overflow) == (abs(exact) >= LIMIT), name
        assert whole(result) == (0 if overflow else exact), name
    for name, exact in (("floordiv", a // b if b else 0), ("mod", a % b if b else 0)):
        result, by_zero = out[name]
        assert bool(by_zero) == (b == 0) and whole(result) == exact, name
    assert int(out["compare"]) == (a > b) - (a < b) and bool(out["equal"]) == (a == b)
    assert whole(out["negate"]) == -a and int(out["sign"]) == (a > 0) - (a < 0)
    assert tx.to_str(out["text"]) == str(a)


@many
@example(LIMIT - 2, 2)
@given(NUMBER, st.integers(-2, 2))
def test_division_next_to_multiples(quotient, offset):
    """Quotient limbs are estimated: just below, at and just above a multiple is where an estimate fails."""
    divisor = max(1, (LIMIT - 3) // (abs(quotient) + 1))
    a = max(1 - LIMIT, min(LIMIT - 1, quotient * divisor + offset))
    for b in (divisor, -divisor):
        out = everything()(bi.from_int(a), bi.from_int(b))
        assert whole(out["floordiv"][0]) == a // b and whole(out["mod"][0]) == a % b


def test_batches_of_random_numbers():
    rng = np.random.default_rng(0)
    size = 4096
    digits = rng.integers(0, 19, (2, size))
    numbers = [[int(rng.integers(0, 10 ** int(d))) * int(rng.choice([-1, 1])) for d in row] for row in digits]
    a, b = (bi.BigInt(np.stack([bi.from_int(n).limbs for n in row])) for row in numbers)
    quotient, remainder, _ = jax.jit(jax.vmap(bi.divmod_))(a, b)
    product, overflow = jax.jit(jax.vmap(bi.mul))(a, b)
    rows = lambda x: [bi.to_int(bi.BigInt(limbs)) for limbs in np.asarray(x.limbs)]  # noqa: E731
    expected = [divmod(x, y) if y else (0, 0) for x, y in zip(*numbers, strict=True)]
    assert list(zip(rows(quotient), rows(remainder), strict=True)) == expected
    exact = [x * y for x, y in zip(*numbers, strict=True)]
    assert np.asarray(overflow).tolist() == [abs(x) >= LIMIT for x in exact]
    assert rows(product) == [x if abs(x) < LIMIT else 0 for x in exact]


@functools.cache
def parser():
    return jax.jit(bi.parse)


@many
@given(
    st.one_of(
        NUMBER.map(str),
        st.text("0123456789+- ", max_size=28),
        st.integers(-(10**26), 10**26).map(str),
        st.binary(max_size=24).map(lambda b: b.decode("latin-1")),
    )
)
@example("999999999999999999")
@example("-1000000000000000000")
@example("00000000000000000000000001")
@example("10000000000000000000000000")
@example(" +5\n")
@example("")
@example("-")
def test_parse(s):
    raw = s.encode("latin-1")
    body = raw.strip(b" \t\n\v\f\r")
    digits = body[1:] if body[:1] in (b"+", b"-") else body
    number = digits != b"" and all(48 <= x <= 57 for x in digits)
    exact = int(body) if number else 0
    result, valid, overflow = parser()(tx.literal(raw, 28))
    assert bool(valid) == (number and abs(exact) < LIMIT) and bool(overflow) == (number and abs(exact) >= LIMIT)
    assert whole(result) == (exact if valid else 0)


@many
@given(st.integers(-(2**31), 2**31 - 1))
@example(-(2**31))
@example(-10000)
def test_from_int32(n):
    assert whole(_from_int32()(np.int32(n))) == n


@functools.cache
def _from_int32():
    return jax.jit(bi.from_int32)


def test_refusals():
    with pytest.raises(ValueError, match="18 digits"):
        bi.from_int(LIMIT)
    with pytest.raises(ValueError, match="at least 19"):
        bi.to_text(bi.from_int(1), 18)
