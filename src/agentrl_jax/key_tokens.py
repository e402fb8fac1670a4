"""KTAE: which tokens make the difference between right and wrong answers of a group."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.groups import group_sum, members
from agentrl_jax.masked import as_float, fill
from agentrl_jax.types import Array


def ktae_key(
    right_with: Array,
    wrong_with: Array,
    right_without: Array,
    wrong_without: Array,
    *,
    max_group: int,
    alpha: float = 1.0,
    beta: float = 1.0,
    top: float = 1.0,
) -> Array:
    """KTAE's key-token value from counts of responses with and without a token, elementwise.

    With ``p`` of Fisher's exact two-sided test, ``F = exp(-2 p)`` (0 for ``p = 1``), ``IG`` the information gain in
    bits, and ``h = asin sqrt(a / (a + c)) - asin sqrt(b / (b + d))``: ``s = (alpha F + beta IG) h / (alpha + beta)``,
    the value is ``2 (sigmoid(s) - 1/2) top``. 0 where all responses are right, or all wrong. ``max_group`` bounds the
    group size.

    Source: Sun et al., KTAE, 2025, arXiv 2505.16826, without its optional term-frequency factor; the code fixes its
    three weights to 1.
    """
    a, b, c, d = (as_float(x) for x in (right_with, wrong_with, right_without, wrong_without))
    p = fisher_p(a, b, c, d, max_group=max_group)
    strength = jnp.where(p >= 1.0 - 1e-5, 0.0, jnp.exp(-2.0 * p))
    right, wrong = a + c, b + d
    total = jnp.maximum(right + wrong, 1.0)
    gain = _bits(right, wrong) - ((a + b) * _bits(a, b) + (c + d) * _bits(c, d)) / total
    share_right, share_wrong = a / jnp.maximum(right, 1.0), b / jnp.maximum(wrong, 1.0)
    effect = jnp.arcsin(jnp.sqrt(share_right)) - jnp.arcsin(jnp.sqrt(share_wrong))
    s = (alpha * strength + beta * gain) * effect / (alpha + beta)
    return jnp.where((right > 0) & (wrong > 0), 2.0 * (jax.nn.sigmoid(s) - 0.5) * top, 0.0)


def ktae(
    tokens: Array,
    mask: Array,
    correct: Array,
    group: Array,
    num_groups: int,
    *,
    vocab_size: int,
    max_group: int,
    special: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    top: float = 1.0,
) -> Array:
    """The value of every written token by ``ktae_key``, to be added to the advantage: ``[N, T]``, 0 elsewhere.

    ``tokens`` ``int32[N, T]``, ``mask`` ``bool[N, T]``, ``correct`` ``[N]``, ``special`` ``bool[N, T]`` tokens that
    get 0 (the end of an action). Counts are of responses of the group that hold the token at least once. Takes ``[N,
    vocab_size]`` bytes.
    """
    mask = mask.astype(bool) & (tokens >= 0) & (tokens < vocab_size)
    who = members(group, num_groups, jnp.any(mask, axis=1))
    right = who.where & (as_float(correct) > 0.5)
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
    holds = (
        jnp.zeros((tokens.shape[0], vocab_size), jnp.int8)
        .at[rows, jnp.where(mask, tokens, 0)]
        .max(mask.astype(jnp.int8))
    )

    def count(of):
        table = jax.ops.segment_sum(jnp.where(of[:, None], holds, 0).astype(jnp.int32), who.group, num_groups)
        return table[who.group[:, None], jnp.where(mask, tokens, 0)]

    with_right, with_wrong = count(right), count(who.where & ~right)
    rights = group_sum(right, who, num_groups)[:, None]
    wrongs = who.size[:, None] - rights
    key = ktae_key(
        with_right, with_wrong, rights - with_right, wrongs - with_wrong,
        max_group=max_group, alpha=alpha, beta=beta, top=top,
    )  # fmt: skip
    counted = mask & who.where[:, None]
    if special is not None:
        counted = counted & ~special.astype(bool)
    return jax.lax.stop_gradient(fill(key, counted))


def fisher_p(a: Array, b: Array, c: Array, d: Array, *, max_group: int) -> Array:
    """Two-sided p of Fisher's exact test on the table ``[[a, b], [c, d]]``, elementwise; totals up to ``max_group``.

    The sum of the probabilities of all tables with these margins that are no likelier than this one.
    """
    rows, cols, total = (as_float(v)[..., None] for v in (a + b, a + c, a + b + c + d))
    log_factorial = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.log(jnp.arange(1.0, max_group + 1)))])
    x = jnp.arange(max_group + 1, dtype=jnp.float32)
    log_p = _log_hypergeometric(x, rows, cols, total, log_factorial)
    here = _log_hypergeometric(as_float(a)[..., None], rows, cols, total, log_factorial)
    return jnp.minimum(jnp.sum(jnp.where(log_p <= here + 1e-4, jnp.exp(log_p), 0.0), axis=-1), 1.0)


def _log_hypergeometric(x: Array, rows: Array, cols: Array, total: Array, log_factorial: Array) -> Array:
    """``log C(cols, x) C(total - cols, rows - x) / C(total, rows)``; -inf where impossible."""

    def of(v):
        return log_factorial[jnp.clip(v, 0, log_factorial.shape[0] - 1).astype(jnp.int32)]

    def log_choose(n, k):
        return of(n) - of(k) - of(n - k)

    possible = (x >= 0) & (x <= rows) & (x <= cols) & (rows - x <= total - cols)
    log_p = log_choose(cols, x) + log_choose(total - cols, rows - x) - log_choose(total, rows)
    return jnp.where(possible, log_p, -jnp.inf)


def _bits(x: Array, y: Array) -> Array:
    """Entropy in bits of the shares of two counts; 0 for an empty table."""
    total = jnp.maximum(x + y, 1.0)
    p, q = x / total, y / total
    return -(p * jnp.log2(jnp.where(p > 0, p, 1.0)) + q * jnp.log2(jnp.where(q > 0, q, 1.0)))
