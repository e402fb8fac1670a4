"""Exact integers of up to 18 decimal digits where JAX has 32 bits: five limbs in base 10**4.

A value is ``sum_i limbs[i] * 10**(4 i)``; every limb carries the sign of the value, so limbs lie in (-10**4, 10**4) and
negation is elementwise. Sums of limb products stay below 2**31. Operations are unbatched, exact for operands with
``|x| < 10**18``, and report a result beyond that instead of returning it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from agentrl_jax import text as tx
from agentrl_jax.types import Array, Text

BASE = 10**4
LIMBS = 5
MAX_DIGITS = 18
CAPACITY = MAX_DIGITS + 1
"""Bytes that hold every value as text: 18 digits and a sign."""

_TOP = 100  # the fifth limb of a value below 10**18 is below this
_BIAS = 30_000  # in units of BASE: makes every limb positive before it is carried
_PLACES = np.asarray([1000, 100, 10, 1], np.int32)


class BigInt(NamedTuple):
    """``limbs``: ``int32[5]``, least significant first, all of one sign, ``|value| < 10**18``."""

    limbs: Array


def from_int(value: int) -> BigInt:
    """Host constant. Raises ValueError for ``|value| >= 10**18``."""
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a BigInt has at most {MAX_DIGITS} digits, got {value}")
    limbs = [abs(value) // BASE**i % BASE * (-1 if value < 0 else 1) for i in range(LIMBS)]
    return BigInt(cast(Array, np.asarray(limbs, np.int32)))


def to_int(x: BigInt) -> int:
    """The value of one concrete ``BigInt`` as a Python integer, on the host."""
    return sum(int(limb) * BASE**i for i, limb in enumerate(np.asarray(x.limbs)))


def from_int32(value: Array | int) -> BigInt:
    """The value of an ``int32[]``."""
    value = jnp.asarray(value, jnp.int32)
    # lax.div and lax.rem truncate, so that all limbs get the sign of the value.
    parts = [lax.rem(lax.div(value, jnp.int32(BASE**i)), jnp.int32(BASE)) for i in range(3)]
    return BigInt(jnp.stack([*parts, *[jnp.zeros_like(value)] * (LIMBS - 3)]))


def sign(x: BigInt) -> Array:
    """-1, 0 or 1, ``int32[]``."""
    return _leading_sign(jnp.asarray(x.limbs))


def negate(x: BigInt) -> BigInt:
    """``-x``."""
    return BigInt(-jnp.asarray(x.limbs))


def compare(a: BigInt, b: BigInt) -> Array:
    """-1, 0 or 1 as ``a`` is smaller than, equal to or greater than ``b``, ``int32[]``."""
    return _leading_sign(jnp.asarray(a.limbs) - b.limbs)


def equal(a: BigInt, b: BigInt) -> Array:
    """``a == b``, ``bool[]``."""
    return jnp.all(jnp.asarray(a.limbs) == b.limbs)


def add(a: BigInt, b: BigInt) -> tuple[BigInt, Array]:
    """``a + b`` and whether it overflows 18 digits (then 0)."""
    return settle(jnp.asarray(a.limbs) + b.limbs)


def sub(a: BigInt, b: BigInt) -> tuple[BigInt, Array]:
    """``a - b`` and whether it overflows 18 digits (then 0)."""
    return settle(jnp.asarray(a.limbs) - b.limbs)


def mul(a: BigInt, b: BigInt) -> tuple[BigInt, Array]:
    """``a * b`` and whether it overflows 18 digits (then 0)."""
    return settle(product_columns(a, b))


def product_columns(a: BigInt, b: BigInt) -> Array:
    """Limbs of ``a * b`` before carrying, ``int32[9]``: ``sum_i a[i] * b[k - i]``, for ``settle``."""
    outer = jnp.asarray(a.limbs)[:, None] * jnp.asarray(b.limbs)[None, :]
    # Row i shifted right by i, by cutting the padded rows one element short; columns are then powers of the base.
    skewed = jnp.pad(outer, ((0, 0), (0, LIMBS))).reshape(-1)[: LIMBS * (2 * LIMBS - 1)].reshape(LIMBS, -1)
    return jnp.sum(skewed, axis=0, dtype=jnp.int32)


def floordiv(a: BigInt, b: BigInt) -> tuple[BigInt, Array]:
    """``a // b`` rounded to minus infinity, and whether ``b`` is zero (then 0)."""
    quotient, _, by_zero = divmod_(a, b)
    return quotient, by_zero


def mod(a: BigInt, b: BigInt) -> tuple[BigInt, Array]:
    """``a % b`` with the sign of ``b``, and whether ``b`` is zero (then 0)."""
    _, remainder, by_zero = divmod_(a, b)
    return remainder, by_zero


def divmod_(a: BigInt, b: BigInt) -> tuple[BigInt, BigInt, Array]:
    """``(a // b, a % b, b == 0)`` with Python's floor semantics; zeros when ``b`` is zero.

    Long division, one quotient limb for each of the five limbs of ``|a|`` (Knuth, TAOCP 2, 4.3.1 D), estimated in
    float32 as ``floor(r / b - 0.05)``. The error of ``r / b < 2 * 10**4`` is below 0.02, so the estimate is the true
    limb or one less, the remainder stays in ``[0, 2 b)``, and one correction at the end suffices.
    """
    sign_a, sign_b = sign(a), sign(b)
    by_zero = sign_b == 0
    # Any divisor will do in place of zero: the results are cleared.
    divisor = jnp.where(by_zero, 1, b.limbs * sign_b)
    scale = _as_float(divisor)

    def next_limb(rest: Array, limb: Array) -> tuple[Array, Array]:
        longer = jnp.concatenate([limb[None], rest])
        guess = jnp.maximum(jnp.floor(_as_float(longer) / scale - 0.05), 0).astype(jnp.int32)
        return _carry(longer - guess * jnp.pad(divisor, (0, 1)))[0][:LIMBS], guess

    # A loop rather than five copies of its body: division is rare, and the copies cost seconds of compilation.
    rest, quotient = lax.scan(next_limb, jnp.zeros(LIMBS, jnp.int32), a.limbs * sign_a, reverse=True)
    quotient, rest = _correct(quotient, rest, divisor, sign_a * sign_b < 0)
    keep = jnp.where(by_zero, 0, sign_b)
    return BigInt(quotient * (sign_a * keep)), BigInt(rest * keep), by_zero


def _correct(quotient: Array, rest: Array, divisor: Array, floor: Array) -> tuple[Array, Array]:
    """Brings the remainder from ``[0, 2 b)`` to ``[0, b)``, then to ``b - r`` where a negative quotient rounds down."""
    less, borrow = _carry(rest - divisor)
    over = borrow >= 0
    rest = jnp.where(over, less, rest)
    down = floor & jnp.any(rest > 0)
    rest = _carry(jnp.where(down, divisor - rest, rest))[0]
    first = np.arange(LIMBS) == 0
    return _carry(quotient + jnp.where(first, over.astype(jnp.int32) + down.astype(jnp.int32), 0))[0], rest


def _as_float(limbs: Array) -> Array:
    weights = np.asarray([float(BASE) ** i for i in range(limbs.shape[0])], np.float32)
    return jnp.sum(limbs.astype(jnp.float32) * weights)


def _leading_sign(limbs: Array) -> Array:
    """Sign of the most significant limb that is not zero: that of the value, when every limb is below the base."""
    weights = 1 << np.arange(limbs.shape[-1], dtype=np.int32)
    return jnp.sign(jnp.sum(jnp.sign(limbs) * weights, dtype=jnp.int32))


def _carry(limbs: Array) -> tuple[Array, Array]:
    """Limbs in ``[0, 10**4)`` of the same value, and what is carried out of the last (negative for a negative value).

    Accepts ``n`` limbs from ``-2.9 * 10**8`` to ``1.8 * 10**9``. No chain of carries: a multiple of ``10**(4 n)`` makes
    all limbs positive; two parallel passes leave carries of 0 or 1; and these ripple inside one integer addition, as
    generate and propagate bits (carry look-ahead).
    """
    n = limbs.shape[0]
    index = np.arange(n, dtype=np.int32)
    limbs = limbs + np.where(index == 0, _BIAS * BASE, _BIAS * (BASE - 1)).astype(np.int32)
    out = jnp.int32(-_BIAS)
    for _ in range(2):
        carry = lax.div(limbs, jnp.int32(BASE))
        limbs = limbs - carry * BASE + jnp.pad(carry[:-1], (1, 0))
        out = out + carry[-1]
    generate = jnp.sum((limbs >= BASE).astype(jnp.int32) << index)
    propagate = jnp.sum((limbs == BASE - 1).astype(jnp.int32) << index)
    ripple = (propagate + 2 * generate) ^ propagate
    limbs = limbs + ((ripple >> index) & 1)
    return jnp.where(limbs >= BASE, limbs - BASE, limbs), out + (ripple >> n)


def settle(limbs: Array) -> tuple[BigInt, Array]:
    """Carries limbs that are a sum, difference or product of two values; and whether that has more than 18 digits.

    ``limbs``: at least five, of magnitude below ``1.5 * 10**9``, with the sign of the leading one that of the value.
    """
    negative = _leading_sign(limbs)
    out, carry = _carry(limbs * negative)
    overflow = (carry > 0) | jnp.any(out[LIMBS:] > 0) | (out[LIMBS - 1] >= _TOP)
    return BigInt(out[:LIMBS] * jnp.where(overflow, 0, negative)), overflow


def place_limbs(digit: Array, place: Array) -> Array:
    """Contribution of decimal ``digit`` at ``10**place`` to each limb, ``int32[..., 5]``; 0 for places beyond 19."""
    tens = jnp.where(place & 1 == 1, 10, 1) * jnp.where(place & 2 == 2, 100, 1)
    limb = np.arange(LIMBS, dtype=np.int32)
    return jnp.where((place >> 2)[..., None] == limb, (digit * tens)[..., None], 0)


def parse(text: tx.Pattern) -> tuple[BigInt, Array, Array]:
    """``(value, valid, overflow)``: optional sign and digits with surrounding whitespace, as ``text.parse_int``.

    ``overflow`` is set for a well-formed number of more than 18 digits, leading zeros aside; ``valid`` for any other.
    """
    data, length = tx.widen(text)
    position, body, last, negative = tx.number_span(data, length)
    digit, place = data - ord("0"), last - position
    good = jnp.all(~body | ((digit >= 0) & (digit <= 9))) & jnp.any(body)
    digit = jnp.where(body & good, digit, 0)
    limbs = jnp.sum(place_limbs(digit, jnp.maximum(place, 0)), axis=0, dtype=jnp.int32)
    overflow = jnp.any((place >= MAX_DIGITS) & (digit > 0))
    keep = jnp.where(overflow, 0, jnp.where(negative, -1, 1))
    return BigInt(limbs * keep), good & ~overflow, overflow


def to_text(x: BigInt, capacity: int = CAPACITY) -> Text:
    """Decimal digits of the value.

    Raises:
      ValueError: the capacity is below 19, which some values need.
    """
    if capacity < CAPACITY:
        raise ValueError(f"to_text needs a capacity of at least {CAPACITY} bytes, got {capacity}")
    limbs = jnp.abs(jnp.asarray(x.limbs))
    digits = (limbs[:, None] // _PLACES[::-1] % 10).reshape(-1)
    position = np.arange(1, digits.shape[0] + 1, dtype=np.int32)
    count = jnp.maximum(jnp.max(jnp.where(digits > 0, position, 0)), 1)
    return tx.format_digits(digits, count, sign(x) < 0, capacity)
