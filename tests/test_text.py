"""Text inside XLA against Python's bytes, for any bytes."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_jax import text as tx
from agentrl_jax.types import Text

C = 24
RAW = st.one_of(st.binary(max_size=C), st.binary(max_size=C).map(lambda b: bytes(b"ab \n,+-1"[x % 8] for x in b)))
SHORT = st.one_of(st.binary(max_size=3), st.text("ab,", max_size=3).map(str.encode))
many = settings(deadline=None, max_examples=150)


@functools.cache
def jitted(name, *args, **kwargs):
    f = getattr(tx, name)
    return jax.jit(lambda *texts: f(*texts, *args, **kwargs))


def T(raw, capacity=C):
    return tx.literal(raw, capacity)


def value(text: Text) -> bytes:
    """The bytes, after the invariant is checked: right types, length within capacity, zero beyond it."""
    data, length = np.asarray(text.data), int(text.length)
    assert data.dtype == np.uint8 and np.asarray(text.length).dtype == np.int32
    assert 0 <= length <= data.shape[0]
    assert not data[length:].any()
    return data[:length].tobytes()


SPACE = b" \t\n\v\f\r"


def test_literal_and_back():
    assert tx.to_str(tx.literal("é=?")) == "é=?" and tx.literal("é=?").data.shape == (4,)
    assert tx.to_str(tx.literal(b"\xffa")) == "\ufffda"
    assert value(tx.empty(3)) == b"" and tx.literal("").data.shape == (1,)
    assert isinstance(tx.literal("a").data, np.ndarray)  # no device work
    for bad in (lambda: tx.literal("abc", 2), lambda: tx.empty(0)):
        with pytest.raises(ValueError, match="capacity"):
            bad()


@many
@given(RAW, RAW, SHORT)
def test_concat_and_resize(a, b, c):
    out, overflow = jitted("concat", capacity=32)(T(a), T(b), T(c, 3))
    assert value(out) == (a + b + c)[:32] and bool(overflow) == (len(a + b + c) > 32)
    for capacity in (5, 40):
        out, overflow = jitted("resize", capacity)(T(a))
        assert value(out) == a[:capacity] and bool(overflow) == (len(a) > capacity) and out.data.shape == (capacity,)


@many
@given(RAW, SHORT, st.integers(-3, C + 3))
@example(b"aaaa", b"aa", 1)
@example(b"", b"", 0)
@example(b"a" * C, b"", C)
def test_search(text, pattern, start):
    first, last, has = _search()(T(text), T(pattern, 3), np.int32(start))
    assert int(first) == text.find(pattern, max(start, 0))
    assert int(last) == text.rfind(pattern, max(start, 0))
    assert bool(has) == (pattern in text)


@functools.cache
def _search():
    return jax.jit(lambda t, p, s: (tx.find(t, p, s), tx.rfind(t, p, s), tx.contains(t, p)))


@many
@given(RAW, RAW, SHORT, st.integers(0, 3))
@example(b"abc", b"abcd", b"abc", 3)
def test_comparisons(a, b, short, cut):
    for x, capacity in ((b, C), (a[:cut], 3), (a[len(a) - cut :], 3), (short, 3), (a, 30)):
        starts, ends, same = _compare()(T(a), T(x, capacity))
        assert bool(starts) == a.startswith(x) and bool(ends) == a.endswith(x) and bool(same) == (a == x)


@functools.cache
def _compare():
    return jax.jit(lambda a, b: (tx.startswith(a, b), tx.endswith(a, b), tx.equal(a, b)))


@many
@given(RAW, st.integers(-5, C + 5), st.integers(-5, C + 5))
def test_slice_clamps(text, start, stop):
    expected = text[max(start, 0) : max(stop, 0)]
    cut = _slice()(T(text), np.int32(start), np.int32(stop))
    assert value(cut[0]) == expected and value(cut[1]) == expected[:4] and value(cut[2]) == text[: max(stop, 0)]


@functools.cache
def _slice():
    return jax.jit(lambda t, a, b: (tx.slice_(t, a, b), tx.slice_(t, a, b, 4), tx.slice_(t, 0, b)))


@many
@given(RAW)
@example(b" \n ")
@example(b"a\n")
@example(b"\r\n  calc 1+1 \r\n\t\n")
def test_strip_lower_blank_last_line(text):
    assert value(jitted("strip")(T(text))) == text.strip(SPACE)
    assert value(jitted("lower")(T(text))) == text.lower()
    assert bool(jitted("is_blank")(T(text))) == (not text.strip(SPACE))
    assert int(jitted("above_last_line")(T(text))) == text.rstrip(SPACE).rfind(b"\n") + 1
    assert value(jitted("last_line")(T(text))) == text.strip(SPACE).split(b"\n")[-1].strip(SPACE)


@many
@given(RAW, st.sampled_from([b",", b"a", b"\n", b"\0"]))
@example(b"a,bb,,ccc,d,e", b",")
def test_split(text, separator):
    parts, count, overflow = jitted("split", separator, 4, 5)(T(text))
    expected = text.split(separator)
    got = [value(Text(parts.data[i], parts.length[i])) for i in range(4)]
    assert got == [p[:5] for p in expected[:4]] + [b""] * (4 - len(expected[:4]))
    assert int(count) == min(len(expected), 4)
    assert bool(overflow) == (len(expected) > 4 or any(len(p) > 5 for p in expected))


def _between(text: bytes, opening: bytes, closing: bytes) -> bytes | None:
    begin = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return None if begin < 0 else text[begin + len(opening) : text.find(closing, begin + len(opening))]


@many
@given(st.lists(st.sampled_from([b"<a>", b"</a>", b"x", b"<", b"/a>"]), max_size=6).map(b"".join))
@example(b"<a>1</a>2</a>")
@example(b"<a>1</a><a>2")
@example(b"<a></a>")
def test_between(text):
    out, found = jitted("between", "<a>", "</a>")(T(text))
    expected = _between(text, b"<a>", b"</a>")
    assert bool(found) == (expected is not None) and value(out) == (expected or b"")


def test_between_does_not_pay_without_the_format():
    for text, inside in (("<a>41</a><a>42</a>", b"42"), ("<a>42</a><a>41</a>", b"41"), ("<a>42", b""), ("42</a>", b"")):
        assert value(jitted("between", "<a>", "</a>")(T(text))[0]) == inside


@many
@given(RAW, RAW, st.booleans(), st.lists(st.booleans(), min_size=C, max_size=C))
def test_where_and_compact(a, b, condition, keep):
    out = _where()(np.bool_(condition), T(a), T(b, 30))
    assert value(out) == (a if condition else b) and out.data.shape == (30,)
    packed, overflow = _compact()(T(a).data, np.asarray(keep))
    expected = bytes(x for x, k in zip(T(a).data.tolist(), keep, strict=True) if k)
    assert value(packed) == expected[:10] and bool(overflow) == (len(expected) > 10)


@functools.cache
def _where():
    return jax.jit(tx.where)


@functools.cache
def _compact():
    return jax.jit(lambda data, keep: tx.compact(data, keep, 10))


@many
@given(RAW, RAW)
@example(b"a", b"a\0")
@example(b"ab", b"ba")
@example(b"", b"\0")
def test_hash_is_of_bytes_and_length_alone(a, b):
    wide = jitted("hash_")(T(a, 40))
    assert wide.dtype == np.uint32 and int(wide) == int(jitted("hash_")(T(a)))
    assert (int(wide) == int(jitted("hash_")(T(b)))) == (a == b)


def test_hash_spreads():
    texts = [f"{i}".encode() for i in range(20000)]
    data = np.stack([T(t, 5).data for t in texts])
    out = np.asarray(jax.vmap(tx.hash_)(Text(data, np.asarray([len(t) for t in texts], np.int32))))
    assert len(np.unique(out)) >= 19990  # a random function loses 0.05 on average
    ones = np.unpackbits(out.view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.all(np.abs(ones - 0.5) < 0.02)


@many
@given(st.integers(-(2**31), 2**31 - 1))
@example(-(2**31))
@example(2**31 - 1)
@example(0)
@example(-1)
@example(10**9)
def test_format_int_exact_and_parse_back(number):
    out = jitted("format_int")(np.int32(number))
    assert value(out) == str(number).encode() and out.data.shape == (11,)
    back, valid = jitted("parse_int")(T(value(out)))
    assert valid and int(back) == number
    assert value(jitted("format_int", 13)(np.int32(number))) == value(out)


def test_format_refuses_what_cannot_hold():
    with pytest.raises(ValueError, match="at least 11"):
        tx.format_int(1, 10)
    with pytest.raises(ValueError, match="0 to 9"):
        tx.format_decimal(1.0, 10, 20)


NUMBERS = st.one_of(
    st.integers(-(10**11), 10**11).map(lambda n: str(n).encode()),
    st.text("0123456789+-. \n", max_size=14).map(str.encode),
    RAW,
)


@many
@given(NUMBERS)
@example(b"2147483648")
@example(b"-2147483648")
@example(b" +0000000000000000042\n")
@example(b"4294967296")
@example(b"99999999999")
@example(b"10000000000")
@example(b"-100000000000000000001")
@example(b"+-1")
@example(b"1_0")
def test_parse_int(text):
    body = text.strip(SPACE)
    digits = body[1:] if body[:1] in (b"+", b"-") else body
    ok = digits != b"" and all(48 <= x <= 57 for x in digits) and -(2**31) <= int(body) < 2**31
    number, valid = jitted("parse_int")(T(text))
    assert number.dtype == np.int32 and bool(valid) == ok and int(number) == (int(body) if ok else 0)


@many
@given(st.one_of(NUMBERS, st.floats(-1e6, 1e6).map(lambda x: f"{x:.6f}".encode())))
@example(b".")
@example(b"-.5")
@example(b"5.")
@example(b"1e5")
@example(b"0.0000000000000000012345")
@example(b"123456789.987654321")
@example(b"1.2.3")
def test_parse_decimal(text):
    body = text.strip(SPACE)
    digits = body[1:] if body[:1] in (b"+", b"-") else body
    ok = digits.count(b".") <= 1 and digits.replace(b".", b"") != b"" and all(48 <= x <= 57 or x == 46 for x in digits)
    number, valid = jitted("parse_decimal")(T(text))
    assert bool(valid) == ok
    assert math.isclose(float(number), float(body) if ok else 0.0, rel_tol=2.4e-7, abs_tol=1e-37)


def test_parse_decimal_beyond_float32_is_invalid():
    for raw, ok in ((b"1" * 45, False), (b"0" * 45 + b"1", True), (b"1" * 38, True)):
        assert bool(jitted("parse_decimal")(T(raw, 46))[1]) == ok


@many
@given(st.one_of(st.floats(width=32), st.integers(-4000, 4000).map(lambda n: n / 16)), st.sampled_from([0, 2, 9]))
@example(0.5, 0)
@example(2.5, 0)
@example(0.125, 2)
@example(-0.001, 2)
@example(99.996, 2)
@example(2147483520.0, 9)
@example(float("nan"), 2)
@example(float("inf"), 2)
@example(1e-38, 9)
def test_format_decimal_rounds_as_python(number, decimals):
    out, overflow = jitted("format_decimal", decimals, C)(np.float32(number))
    number = float(np.float32(number))
    if not abs(number) < 2**31:
        assert overflow and value(out) == b""
        return
    expected = format(number, f".{decimals}f")
    expected = expected[1:] if float(expected) == 0 and expected[0] == "-" else expected
    assert value(out) == expected.encode() and not overflow


def test_format_decimal_reports_what_is_cut():
    out, overflow = tx.format_decimal(-1234.5, 2, 6)
    assert overflow and value(out) == b"-1234."


def test_vmap_keeps_rows_apart():
    rows = [b" ab ", b"", b"\xff\xfe", b"x" * C]
    batch = Text(np.stack([T(r).data for r in rows]), np.asarray([len(r) for r in rows], np.int32))
    out = jax.jit(jax.vmap(tx.strip))(batch)
    assert [value(Text(out.data[i], out.length[i])) for i in range(4)] == [r.strip() for r in rows]
