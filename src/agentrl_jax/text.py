"""Byte strings of static capacity inside XLA: build, search, cut, parse and format.

Every function but ``literal``, ``empty``, ``to_str`` and ``to_bytes`` is pure, unbatched, jittable and vmappable, takes
any bytes, never reads or writes out of bounds, and keeps the invariant of ``Text``: zero at and beyond ``length``.
What does not fit is cut and reported in an ``overflow`` result. Bytes are widened to int32 on entry, since uint8
sums wrap. A pattern is a ``Text``, or a Python ``str`` or ``bytes`` constant.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.types import Array, Text

Pattern: TypeAlias = Text | str | bytes

_POW10 = np.asarray([10**k for k in range(10)], np.uint32)
_FLOAT_POW10 = np.asarray([float(f"1e{k}") for k in range(39)], np.float32)
_SPACE, _ZERO, _MINUS, _PLUS, _DOT = 32, 48, 45, 43, 46
INT_CAPACITY = 11  # bytes that hold every int32: ten digits and a sign


def literal(s: str | bytes, capacity: int | None = None) -> Text:
    """Host constant of ``s`` (UTF-8) with ``capacity`` bytes, by default its own length, at least 1.

    Raises:
      ValueError: ``s`` has more than ``capacity`` bytes, or the capacity is below 1.
    """
    raw = s.encode() if isinstance(s, str) else bytes(s)
    capacity = max(len(raw), 1) if capacity is None else capacity
    if capacity < 1 or len(raw) > capacity:
        raise ValueError(
            f"literal {raw[:40]!r} has {len(raw)} bytes: the capacity must be at least that and 1, got {capacity}"
        )
    data = np.zeros(capacity, np.uint8)
    data[: len(raw)] = np.frombuffer(raw, np.uint8)
    return Text(cast(Array, data), cast(Array, np.int32(len(raw))))


def empty(capacity: int) -> Text:
    """The empty string with ``capacity`` bytes, a host constant. Raises ValueError for a capacity below 1."""
    return literal(b"", capacity)


def to_bytes(text: Text) -> bytes:
    """The bytes of one concrete ``Text``, on the host."""
    return np.asarray(text.data, np.uint8)[: int(text.length)].tobytes()


def to_str(text: Text) -> str:
    """The characters of one concrete ``Text``, on the host; bytes that are not UTF-8 become U+FFFD."""
    return to_bytes(text).decode("utf-8", errors="replace")


def widen(x: Pattern) -> tuple[Array, Array]:
    """``(data int32[C], length int32[])``: bytes widened before any arithmetic, and the length."""
    text = x if isinstance(x, Text) else literal(x)
    return jnp.asarray(text.data).astype(jnp.int32), jnp.asarray(text.length, jnp.int32)


def _close(data: Array, length: Array) -> Text:
    """Packs bytes, clearing what lies at and beyond ``length``."""
    inside = jnp.arange(data.shape[0], dtype=jnp.int32) < length
    return Text(jnp.where(inside, data, 0).astype(jnp.uint8), length.astype(jnp.int32))


def _is_space(data: Array) -> Array:
    return (data == _SPACE) | ((data >= 9) & (data <= 13))


def resize(text: Pattern, capacity: int) -> tuple[Text, Array]:
    """The same string with another capacity, cut when it does not fit: ``(Text, overflow bool[])``."""
    data, length = widen(text)
    data = jnp.pad(data, (0, max(capacity - data.shape[0], 0)))[:capacity]
    return _close(data, jnp.minimum(length, capacity)), length > capacity


def where(condition: Array, a: Pattern, b: Pattern) -> Text:
    """``a`` where the ``bool[]`` condition holds, else ``b``, with the larger of their capacities."""
    (data_a, length_a), (data_b, length_b) = widen(a), widen(b)
    capacity = max(data_a.shape[0], data_b.shape[0])
    data_a, data_b = (jnp.pad(d, (0, capacity - d.shape[0])) for d in (data_a, data_b))
    return _close(jnp.where(condition, data_a, data_b), jnp.where(condition, length_a, length_b))


def compact(data: Array, keep: Array, capacity: int) -> tuple[Text, Array]:
    """The bytes ``data [N]`` where ``keep [N]`` is true, in order, cut at ``capacity``: ``(Text, overflow bool[])``."""
    data, kept = jnp.asarray(data).astype(jnp.int32), jnp.cumsum(keep.astype(jnp.int32))
    slot = jnp.arange(capacity, dtype=jnp.int32)
    out = jnp.sum(jnp.where(keep & (kept == slot[:, None] + 1), data, 0), axis=1)
    return _close(out, jnp.minimum(kept[-1], capacity)), kept[-1] > capacity


def concat(*texts: Pattern, capacity: int) -> tuple[Text, Array]:
    """The strings one after the other, cut at ``capacity``: ``(Text, overflow bool[])``.

    One gather: output byte ``i`` reads piece ``j``, the last that begins at or before ``i``.
    """
    opened = [widen(t) for t in texts]
    pool = jnp.concatenate([data for data, _ in opened])
    index = position = jnp.arange(capacity, dtype=jnp.int32)
    offset, base = jnp.int32(0), 0
    for data, length in opened:
        index = jnp.where(position >= offset, position - offset + base, index)
        offset, base = offset + length, base + data.shape[0]
    return _close(jnp.take(pool, index, mode="clip"), jnp.minimum(offset, capacity)), offset > capacity


def slice_(text: Pattern, start: Array | int, stop: Array | int, capacity: int | None = None) -> Text:
    """Bytes ``[start, stop)``, both clamped to ``[0, length]``, cut to ``capacity`` (by default that of ``text``)."""
    data, length = widen(text)
    capacity = data.shape[0] if capacity is None else capacity
    if isinstance(start, int) and start <= 0:
        return resize(Text(data, jnp.clip(jnp.asarray(stop, jnp.int32), 0, length)), capacity)[0]
    start = jnp.clip(jnp.asarray(start, jnp.int32), 0, length)
    stop = jnp.clip(jnp.asarray(stop, jnp.int32), start, length)
    out = jnp.take(data, start + jnp.arange(capacity, dtype=jnp.int32), mode="clip")
    return _close(out, jnp.minimum(stop - start, capacity))


def _matches(text: Pattern, pattern: Pattern, start: Array | int) -> Array:
    """``bool[C + 1]``: whether the pattern stands at each position, the end included, at or after ``start``."""
    data, length = widen(text)
    want, size = widen(pattern)
    c, p = data.shape[0], want.shape[0]
    row = c + p
    # Row k of this matrix is the text shifted by k: rows of a periodic sequence cut one element longer than its period.
    tiled = jnp.broadcast_to(jnp.pad(data, (0, p)), (p + 1, row)).reshape(-1)
    windows = tiled[: p * (row + 1)].reshape(p, row + 1)[:, : c + 1]
    k = jnp.arange(p, dtype=jnp.int32)
    same = jnp.all((windows == want[:, None]) | (k >= size)[:, None], axis=0)
    position = jnp.arange(c + 1, dtype=jnp.int32)
    return same & (position >= start) & (position + size <= length)


def find(text: Pattern, pattern: Pattern, start: Array | int = 0) -> Array:
    """Index of the first occurrence at or after ``start``, ``int32[]``, or -1."""
    hits = _matches(text, pattern, start)
    return jnp.where(jnp.any(hits), jnp.argmax(hits), -1).astype(jnp.int32)


def rfind(text: Pattern, pattern: Pattern, start: Array | int = 0) -> Array:
    """Index of the last occurrence at or after ``start``, ``int32[]``, or -1."""
    hits = _matches(text, pattern, start)
    return jnp.max(jnp.where(hits, jnp.arange(hits.shape[0], dtype=jnp.int32), -1))


def contains(text: Pattern, pattern: Pattern) -> Array:
    """Whether the pattern occurs, ``bool[]``."""
    return jnp.any(_matches(text, pattern, 0))


def startswith(text: Pattern, pattern: Pattern) -> Array:
    """Whether the text begins with the pattern, ``bool[]``."""
    data, length = widen(text)
    want, size = widen(pattern)
    n = min(data.shape[0], want.shape[0])
    same = (data[:n] == want[:n]) | (jnp.arange(n, dtype=jnp.int32) >= size)
    return jnp.all(same) & (size <= length)


def endswith(text: Pattern, pattern: Pattern) -> Array:
    """Whether the text ends with the pattern, ``bool[]``."""
    size, length = widen(pattern)[1], widen(text)[1]
    return equal(slice_(text, length - size, length), pattern) & (size <= length)


def equal(a: Pattern, b: Pattern) -> Array:
    """Whether two strings have the same bytes, ``bool[]``; their capacities may differ."""
    (data_a, length_a), (data_b, length_b) = widen(a), widen(b)
    n = min(data_a.shape[0], data_b.shape[0])
    return jnp.all(data_a[:n] == data_b[:n]) & (length_a == length_b)


def is_blank(text: Pattern) -> Array:
    """Whether the string is empty or ASCII whitespace throughout, ``bool[]``."""
    return _trim(*widen(text))[1] < 0


def _trim(data: Array, length: Array) -> tuple[Array, Array]:
    """First and last index that is not whitespace; ``(C, -1)`` for a blank string."""
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    solid = (position < length) & ~_is_space(data)
    return jnp.min(jnp.where(solid, position, data.shape[0])), jnp.max(jnp.where(solid, position, -1))


def strip(text: Pattern) -> Text:
    """The string without leading and trailing ASCII whitespace."""
    first, last = _trim(*widen(text))
    return slice_(text, first, last + 1)


def lower(text: Pattern) -> Text:
    """ASCII upper-case letters in lower case; other bytes as they are."""
    data, length = widen(text)
    return _close(jnp.where((data >= 65) & (data <= 90), data + 32, data), length)


def hash_(text: Pattern) -> Array:
    """``uint32[]`` hash of the bytes and the length, whatever the capacity.

    ``fmix(length + sum_i fmix(257 i + byte_i + 1))`` with MurmurHash3's finaliser (Appleby, 2011): a sum of mixed
    (position, byte) pairs, so it is one vector expression instead of a chain over bytes.
    """
    data, length = widen(text)
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    mixed = _fmix((257 * position + data + 1).astype(jnp.uint32))
    total = jnp.sum(jnp.where(position < length, mixed, jnp.uint32(0)), dtype=jnp.uint32)
    return _fmix(total + length.astype(jnp.uint32))


def _fmix(h: Array) -> Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def split(text: Pattern, separator: Pattern | int, parts: int, capacity: int) -> tuple[Text, Array, Array]:
    """The pieces between one-byte separators, as ``bytes.split``: ``(Text[parts], count int32[], overflow bool[])``.

    ``separator`` is a byte value or a string of one byte. ``count`` is the number of pieces returned, at most
    ``parts``, and later ones are empty; ``overflow`` is set when there are more, or a piece is cut to ``capacity``.
    """
    data, length = widen(text)
    byte = separator if isinstance(separator, int) else widen(separator)[0][0]
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    cut = (data == byte) & (position < length)
    seen = jnp.cumsum(cut.astype(jnp.int32))
    k = jnp.arange(parts, dtype=jnp.int32)
    stop = jnp.min(jnp.where(cut & (seen == k[:, None] + 1), position, length), axis=1)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), stop[:-1] + 1])
    total = seen[-1] + 1
    pieces = jax.vmap(lambda a, b: slice_(text, a, b, capacity))(start, stop)
    longer = (k < total) & (stop - start > capacity)
    return pieces, jnp.minimum(total, parts), (total > parts) | jnp.any(longer)


def above_last_line(text: Pattern) -> Array:
    """Bytes above the last line that is not blank, ``int32[]``; 0 when there is none."""
    return rfind(slice_(text, 0, _trim(*widen(text))[1]), "\n") + 1


def last_line(text: Pattern) -> Text:
    """The last line that is not blank, without surrounding whitespace; empty when there is none."""
    return strip(slice_(text, above_last_line(text), widen(text)[1]))


def between(text: Pattern, opening: Pattern, closing: Pattern) -> tuple[Text, Array]:
    """The last complete tagged span, without its tags: ``(Text, found bool[])``.

    From the last opening tag that has a closing tag behind it to the first such closing tag; empty when not found.
    """
    size = widen(opening)[1]
    starts = _matches(text, opening, 0)
    position = jnp.arange(starts.shape[0], dtype=jnp.int32)
    last = rfind(text, closing)
    begin = jnp.max(jnp.where(starts & (position + size <= last), position, -1))
    found = begin >= 0
    stop = find(text, closing, begin + size)
    return slice_(text, jnp.where(found, begin + size, 0), jnp.where(found, stop, 0)), found


def format_int(value: Array | int, capacity: int = INT_CAPACITY) -> Text:
    """Decimal digits of an ``int32[]``, exact for every value.

    Raises:
      ValueError: the capacity is below 11, which some values need (``resize`` afterwards where less is known to do).
    """
    if capacity < INT_CAPACITY:
        raise ValueError(f"format_int needs a capacity of at least {INT_CAPACITY} bytes, got {capacity}")
    number = jnp.asarray(value, jnp.int32)
    negative = number < 0
    # The magnitude as uint32, since that of the smallest int32 is no int32.
    magnitude = jnp.where(negative, -number.astype(jnp.uint32), number.astype(jnp.uint32))
    digits = (magnitude // _POW10 % 10).astype(jnp.int32)
    count = 1 + jnp.sum(magnitude >= _POW10[1:], dtype=jnp.int32)
    return format_digits(digits, count, negative, capacity)


def format_digits(digits: Array, count: Array, negative: Array, capacity: int) -> Text:
    """Text of the first ``count`` of ``digits``, given least significant first, with a sign in front when negative."""
    sign = negative.astype(jnp.int32)
    position = jnp.arange(capacity, dtype=jnp.int32)
    out = _ZERO + jnp.take(digits, count - 1 - (position - sign), mode="clip")
    return _close(jnp.where(negative & (position == 0), _MINUS, out), jnp.minimum(count + sign, capacity))


def number_span(data: Array, length: Array) -> tuple[Array, Array, Array, Array]:
    """``(position int32[C], body bool[C], last, negative)``: what is between whitespace at the ends, less one sign."""
    first, last = _trim(data, length)
    position = jnp.arange(data.shape[0], dtype=jnp.int32)
    lead = position == first
    minus, plus = jnp.any(lead & (data == _MINUS)), jnp.any(lead & (data == _PLUS))
    begin = first + (minus | plus).astype(jnp.int32)
    return position, (position >= begin) & (position <= last), last, minus


def parse_int(text: Pattern) -> tuple[Array, Array]:
    """``(int32[], valid bool[])``: optional sign and digits, surrounding whitespace allowed; 0 when invalid.

    A number outside int32 is invalid; leading zeros are not.
    """
    data, length = widen(text)
    position, body, last, negative = number_span(data, length)
    digit = data - _ZERO
    good = jnp.all(~body | ((digit >= 0) & (digit <= 9))) & jnp.any(body)
    digit = jnp.where(body & good, digit, 0).astype(jnp.uint32)
    place = last - position
    low = jnp.sum(jnp.where(place < 9, digit * jnp.take(_POW10, place, mode="clip"), 0), dtype=jnp.uint32)
    top = jnp.sum(jnp.where(place == 9, digit, 0), dtype=jnp.uint32)
    limit = jnp.uint32(2**31 - 1) + negative
    magnitude = jnp.minimum(top, 3) * jnp.uint32(10**9) + low
    valid = good & ~jnp.any((place > 9) & (digit > 0)) & (magnitude <= limit)
    value = jnp.where(negative, -magnitude, magnitude).astype(jnp.int32)
    return jnp.where(valid, value, 0), valid


def parse_decimal(text: Pattern) -> tuple[Array, Array]:
    """``(float32[], valid bool[])``: sign, digits with at most one point, surrounding whitespace; 0 when invalid.

    Nine significant digits are read as an integer and scaled by a power of ten: within two units in the last place.
    A number beyond float32 is invalid.
    """
    data, length = widen(text)
    position, body, last, negative = number_span(data, length)
    dot, digit = body & (data == _DOT), data - _ZERO
    numeral = body & ~dot
    good = jnp.all(~numeral | ((digit >= 0) & (digit <= 9))) & jnp.any(numeral) & (jnp.sum(dot) <= 1)
    digit = jnp.where(numeral & good, digit, 0)
    fraction = jnp.where(jnp.any(dot), last - jnp.max(jnp.where(dot, position, 0)), 0)
    # Power of ten of each digit when the point is left out; digits beyond the ninth significant one are dropped.
    place = last - position - ((last - position) > fraction) * jnp.any(dot)
    drop = jnp.maximum(jnp.max(jnp.where(digit > 0, place, 0)) - 8, 0)
    scale = jnp.take(_POW10, place - drop, mode="clip")
    mantissa = jnp.sum(jnp.where(place >= drop, digit.astype(jnp.uint32) * scale, 0), dtype=jnp.uint32)
    value = _scale10(mantissa.astype(jnp.float32), drop - fraction)
    valid = good & jnp.isfinite(value)
    return jnp.where(valid, jnp.where(negative, -value, value), 0.0), valid


def _scale10(x: Array, exponent: Array) -> Array:
    """``x * 10**exponent`` in float32, dividing for negative exponents: powers up to ten are exact there."""
    up = x * jnp.take(_FLOAT_POW10, exponent, mode="clip")
    down = x / jnp.take(_FLOAT_POW10, -exponent, mode="clip")
    down = down / jnp.take(_FLOAT_POW10, -exponent - 38, mode="clip")
    return jnp.where(x == 0, 0.0, jnp.where(exponent >= 0, jnp.where(exponent > 38, jnp.inf, up), down))


def format_decimal(value: Array | float, decimals: int, capacity: int) -> tuple[Text, Array]:
    """A ``float32[]`` with ``decimals`` (0 to 9) digits behind the point: ``(Text, overflow bool[])``.

    Rounds the exact binary value half to even, as Python's ``format(value, f".{decimals}f")``; a result of zero carries
    no sign. ``overflow``: the text was cut, or ``|value| >= 2**31`` or is not finite (then the text is empty).

    Raises:
      ValueError: ``decimals`` outside 0 to 9.
    """
    if not 0 <= decimals <= 9:
        raise ValueError(f"decimals must be 0 to 9, got {decimals}")
    value = jnp.asarray(value, jnp.float32)
    held = jnp.abs(value) < 2.0**31
    size = jnp.where(held, jnp.abs(value), 0.0)
    fraction, up = _round_fraction(size - jnp.floor(size), jnp.floor(size).astype(jnp.uint32), decimals)
    carry = fraction + up >= 10**decimals
    whole = jnp.floor(size).astype(jnp.uint32) + carry
    rest = jnp.where(carry, 0, fraction + up).astype(jnp.uint32)
    low = (rest // _POW10[:decimals] % 10).astype(jnp.int32)
    high = (whole // _POW10 % 10).astype(jnp.int32)
    # The point is the "digit" of byte value "." among the digits, least significant first.
    point = jnp.full(min(decimals, 1), _DOT - _ZERO, jnp.int32)
    digits = jnp.concatenate([low, point, high])
    count = low.shape[0] + point.shape[0] + 1 + jnp.sum(whole >= _POW10[1:], dtype=jnp.int32)
    negative = (value < 0) & ((whole > 0) | (rest > 0))
    return format_digits(digits, jnp.where(held, count, 0), negative, capacity), ~held | (count + negative > capacity)


def _round_fraction(fraction: Array, whole: Array, decimals: int) -> tuple[Array, Array]:
    """``(digits uint32[], up uint32[])``: the fraction's first decimals, and whether the rest rounds them up.

    Fixed point in two 24-bit limbs with a sticky bit for what lies below: exact for a float32 in [0, 1).
    """
    scaled = fraction * 2.0**24
    high = jnp.floor(scaled)
    scaled = (scaled - high) * 2.0**24
    low = jnp.floor(scaled)
    sticky = scaled > low
    high, low, mask = high.astype(jnp.uint32), low.astype(jnp.uint32), jnp.uint32(2**24 - 1)
    digits = jnp.uint32(0)
    for _ in range(decimals):
        low = low * 10
        high = high * 10 + (low >> 24)
        digits, high, low = digits * 10 + (high >> 24), high & mask, low & mask
    half = jnp.uint32(2**23)
    above = (high > half) | ((high == half) & ((low > 0) | sticky))
    odd = (digits if decimals else whole) % 2 == 1
    return digits, (above | ((high == half) & odd)).astype(jnp.uint32)
