"""From logits to a token and the log-probability of the distribution it was really drawn from."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.types import Array

IMPOSSIBLE = -1e30
"""Stands for a log-probability of minus infinity, so that products with a zero probability stay zero."""

_FAN = 16
_BELOW_ONE = 1 - 2**-23


class Sample(NamedTuple):
    """``token``: ``int32[...]``; ``logp``: ``float32[...]``, its log-probability, NaN where logits were not finite."""

    token: Array
    logp: Array


def log_probs(logits: Array, temperature: Array | float = 1.0, allowed: Array | None = None) -> Array:
    """Log-probabilities at a temperature over the allowed tokens: ``log_softmax(logits / temperature)`` in float32.

    The one scoring function of sampling and training: finite values and gradients for any finite or ``-inf`` logits,
    whatever their dtype. NaN and ``+inf`` make the row NaN.

    Args:
      logits: ``[..., V]``; cast to float32 before anything else.
      temperature: ``[...]`` or a scalar. 0 is greedy, and is scored as temperature 1.
      allowed: ``bool[V]`` or ``bool[..., V]``; other tokens get a log-probability near -1e30. None: all.

    Returns:
      ``float32[..., V]``; -1e30 or less everywhere in a row where nothing is possible.
    """
    temperature = _rows(temperature, logits)
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)[..., None]
    return _log_softmax(_masked(scaled, allowed))


def entropy(logp: Array) -> Array:
    """Shannon entropy in nats, ``-sum p log p``: ``[..., V] -> [...]``; impossible tokens add 0, gradient too."""
    p = jnp.exp(logp)
    return -jnp.sum(p * jnp.where(p > 0, logp, 0.0), axis=-1)


def sample(
    uniform: Array,
    logits: Array,
    temperature: Array | float = 1.0,
    *,
    allowed: Array | None = None,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
) -> Sample:
    """Draws a token by inverting the cumulative distribution at one uniform number a row.

    The token is the first index whose cumulative probability exceeds ``uniform`` times the total: never one of
    probability zero. Temperature 0 takes the most probable token (the lowest index of equals). A row whose logits
    are not finite gives its largest allowed entry and a log-probability of NaN.

    Args:
      uniform: ``float32[...]`` in ``[0, 1)``.
      logits: ``[..., V]``.
      temperature: ``[...]`` or a scalar, 0 or more.
      allowed: ``bool[V]`` or ``bool[..., V]``; None: all.
      top_k: keep exactly the ``k`` most probable tokens (at least 1; equals by index); None: no such filter.
      top_p: keep tokens while the mass before them is smaller than ``p`` (Holtzman et al., 2019, arXiv:1904.09751);
        applied to what ``top_k`` left, renormalised. None: no such filter; 1 keeps all.

    Returns:
      The token and its log-probability under temperature and filters; for greedy rows, at temperature 1 unfiltered.
    """
    temperature = _rows(temperature, logits)
    ranking = _masked(logits.astype(jnp.float32), allowed)
    best = jnp.argmax(ranking, axis=-1).astype(jnp.int32)
    logp = log_probs(logits, temperature, allowed)
    p, log_kept = _filtered(jnp.exp(logp), ranking, top_k, top_p)
    greedy = temperature <= 0
    drawn = (jnp.isfinite(log_kept)) & ~greedy
    token = jnp.where(drawn, _invert(p, uniform), best)
    token_logp = jnp.take_along_axis(logp, token[..., None], axis=-1)[..., 0]
    return Sample(token, token_logp - jnp.where(greedy, 0.0, log_kept))


def _rows(x: Array | float | int, logits: Array) -> Array:
    return jnp.broadcast_to(jnp.asarray(x, jnp.float32), logits.shape[:-1])


def _masked(x: Array, allowed: Array | None) -> Array:
    x = jnp.maximum(x, IMPOSSIBLE)  # keeps NaN, so that it can be seen downstream
    if allowed is None:
        return x
    # Below every allowed token, so that the largest entry is an allowed one even where all logits are -inf.
    return jnp.where(jnp.broadcast_to(allowed, x.shape), x, 2 * IMPOSSIBLE)


def _log_softmax(x: Array) -> Array:
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    dead = top <= IMPOSSIBLE
    shifted = x - jnp.where(dead, 0.0, top)
    total = jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)
    return shifted - jnp.log(jnp.where(dead, 1.0, total))


def _filtered(p: Array, ranking: Array, top_k, top_p) -> tuple[Array, Array]:
    """Probabilities with filtered tokens at 0 (not renormalised), and the log of the mass kept (0 without filters)."""
    if top_k is None and top_p is None:
        return p, jnp.where(jnp.isnan(p[..., 0]) | (ranking.max(-1) <= IMPOSSIBLE), jnp.nan, 0.0)
    key = _order_key(ranking)
    if top_k is not None:
        p = jnp.where(_keep(key, jnp.ones_like(p), jnp.maximum(_rows(top_k, p), 1.0)), p, 0.0)
    if top_p is not None:
        share = _rows(top_p, p)
        # At 1 the rounded mass before the last token may already reach 1.
        limit = jnp.where(share >= 1, jnp.inf, jnp.maximum(share * jnp.sum(p, axis=-1), jnp.finfo(jnp.float32).tiny))
        p = jnp.where(_keep(key, p, limit), p, 0.0)
    return p, jnp.log(jnp.sum(p, axis=-1))


def _order_key(x: Array) -> Array:
    """``uint32`` that orders float32 exactly as its values do (both zeros equal)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _keep(key: Array, weight: Array, limit: Array) -> Array:
    """Tokens before which (larger key first, then lower index) less than ``limit`` of ``weight`` lies.

    Two bisections instead of a sort: the smallest key whose larger ones weigh less than the limit, then the last
    index among the tokens of exactly that key.
    """

    def above(cut):
        return jnp.sum(jnp.where(key > cut[..., None], weight, 0.0), axis=-1)

    cut = _bisect(lambda c: above(c) < limit, 32, limit.shape)
    tie = key == cut[..., None]
    index = jax.lax.broadcasted_iota(jnp.uint32, key.shape, key.ndim - 1)
    before = above(cut)

    def exhausted(last):
        used = jnp.sum(jnp.where(tie & (index <= last[..., None]), weight, 0.0), axis=-1)
        return before + used >= limit

    last = _bisect(exhausted, max(1, (key.shape[-1] - 1).bit_length()), limit.shape)
    return (key > cut[..., None]) | (tie & (index <= last[..., None]))


def _bisect(holds, bits: int, shape: tuple[int, ...]) -> Array:
    """The smallest ``uint32`` of so many bits for which the monotone predicate holds, or the largest of all."""

    def step(i, low):
        # Keeps every number below `low` failing, from the highest bit down.
        half = jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32)
        return jnp.where(holds(low + (half - 1)), low, low + half)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros(shape, jnp.uint32))


def _invert(p: Array, uniform: Array) -> Array:
    """First index whose cumulative sum exceeds ``uniform * total``, through a pyramid of sums of 16.

    A running sum over the whole vocabulary would cost more, and its rounding could give width to a zero. Here every
    level adds up at most 32 numbers one after the other, where adding zero changes nothing.
    """
    levels = [p]
    while levels[-1].shape[-1] > 2 * _FAN:
        levels.append(jnp.sum(_groups(levels[-1]), axis=-1))
    index, rest = _first_beyond(levels[-1], uniform, relative=True)
    for level in reversed(levels[:-1]):
        group = jnp.take_along_axis(_groups(level), index[..., None, None], axis=-2)[..., 0, :]
        inner, rest = _first_beyond(group, rest)
        index = index * _FAN + inner
    return index


def _groups(x: Array) -> Array:
    short = -x.shape[-1] % _FAN
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return x.reshape(*x.shape[:-1], -1, _FAN)


def _first_beyond(p: Array, at: Array, relative: bool = False) -> tuple[Array, Array]:
    """First index whose running sum exceeds ``at`` (of the total, if relative), and how far ``at`` lies into it."""
    sums = [p[..., 0]]
    for i in range(1, p.shape[-1]):
        sums.append(sums[-1] + p[..., i])
    total = sums[-1]
    at = jnp.minimum(at * total if relative else at, total * _BELOW_ONE)  # rounding must not step over the end
    index, start = jnp.zeros(at.shape, jnp.int32), jnp.zeros_like(at)
    for running in sums[:-1]:
        passed = running <= at
        index, start = index + passed, jnp.where(passed, running, start)
    return index, at - start
