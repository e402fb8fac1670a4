"""Sums, means, variances and loss aggregation over the entries that count.

Masked entries may hold anything, NaN and infinity too: they are replaced before any arithmetic, so they touch
neither a value nor a gradient. An empty mask gives exactly 0. Statistics are computed in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.types import Array

Axis = int | Sequence[int] | None

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def as_float(x: Array | float) -> Array:
    """``x`` in float32 at least: integers, booleans and half precisions are widened, float64 stays."""
    array = jnp.asarray(x)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def fill(x: Array | float, mask: Array | None, value: float = 0.0) -> Array:
    """``x`` where ``mask``, else ``value``, in float32 at least; ``mask=None`` keeps everything."""
    x = as_float(x)
    return x if mask is None else jnp.where(jnp.asarray(mask).astype(bool), x, value)


def fixed(x: Array | float, mask: Array | None = None) -> Array:
    """``x`` without gradient, 0 outside ``mask`` (a scalar is not masked)."""
    return jax.lax.stop_gradient(fill(x, mask if jnp.ndim(x) else None))


def masked_sum(x: Array, mask: Array, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """``sum_i m_i x_i`` over ``axis``; 0 where nothing counts."""
    return jnp.sum(fill(x, mask), axis=axis, keepdims=keepdims)


def masked_count(mask: Array, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """How many entries count along ``axis``, as float32."""
    return jnp.sum(jnp.asarray(mask).astype(bool), axis=axis, keepdims=keepdims, dtype=jnp.float32)


def masked_mean(x: Array, mask: Array, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """``sum_i m_i x_i / max(sum_i m_i, 1)`` over ``axis``; exactly 0 where nothing counts."""
    mask = jnp.broadcast_to(mask, jnp.shape(x))
    return masked_sum(x, mask, axis, keepdims=keepdims) / jnp.maximum(masked_count(mask, axis, keepdims=keepdims), 1.0)


def masked_var(x: Array, mask: Array, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Array:
    """``sum_i m_i (x_i - mean)^2 / max(n - ddof, 1)`` over ``axis``, in two passes.

    One counted entry gives 0 for ``ddof`` 0 and 1, and so does none.
    """
    mask = jnp.broadcast_to(mask, jnp.shape(x))
    centred = fill(x, mask) - masked_mean(x, mask, axis, keepdims=True)
    count = masked_count(mask, axis, keepdims=keepdims)
    return masked_sum(centred**2, mask, axis, keepdims=keepdims) / jnp.maximum(count - ddof, 1.0)


def whiten(
    x: Array,
    mask: Array,
    axis: Axis = None,
    *,
    ddof: float = 1,
    eps: float = 1e-8,
    count: Array | None = None,
    shift_mean: bool = True,
) -> Array:
    """``(x - mean) / sqrt(var + eps)`` over the counted entries of ``axis``; 0 elsewhere.

    Args:
      x: values, any shape.
      mask: the shape of ``x``; the entries that count and get a value.
      axis: axes of the statistics; all by default. A statistic of a batch must see the whole batch.
      ddof: 1 divides by ``n - 1`` (verl, tunix), 0 by ``n`` (OpenRLHF).
      eps: added to the variance.
      count: how often each entry counts, the shape of ``x``: the number of tokens that share a sequence's value,
        say. The statistics are then those of the repeated values.
      shift_mean: False adds the mean back, so that only the scale changes.

    Returns:
      The shape of ``x``. Equal values, a single one too, give exactly 0 (before the mean is added back): the
      smallest counted value is subtracted first, so no rounding residue is divided by a tiny deviation.
    """
    mask = jnp.broadcast_to(jnp.asarray(mask).astype(bool), jnp.shape(x))
    low = jnp.min(fill(x, mask, jnp.inf), axis=axis, keepdims=True)
    low = jax.lax.stop_gradient(jnp.where(jnp.isfinite(low), low, 0.0))
    shifted = fill(fill(x, mask) - low, mask)
    times = mask.astype(shifted.dtype) if count is None else fill(jnp.broadcast_to(count, mask.shape), mask)
    total = jnp.sum(times, axis=axis, keepdims=True)
    mean = jnp.sum(times * shifted, axis=axis, keepdims=True) / jnp.maximum(total, 1.0)
    centred = fill(shifted - mean, mask)
    var = jnp.sum(times * centred**2, axis=axis, keepdims=True) / jnp.maximum(total - ddof, 1.0)
    scale = jnp.where(var + eps > 0, jax.lax.rsqrt(jnp.where(var + eps > 0, var + eps, 1.0)), 0.0)
    return centred * scale if shift_mean else fill(centred * scale + mean + low, mask)


def aggregation_weights(
    mask: Array,
    mode: str,
    *,
    norm: Array | float | None = None,
    sequence: Array | None = None,
    num_sequences: int | None = None,
) -> Array:
    """Weights whose sum of products with per-token values is the aggregate, the denominators inside.

    With ``m`` the mask, ``n_i = sum_t m_it``, ``N = sum_i n_i`` and ``B+`` the number of sequences with ``n_i > 0``::

      token-mean               m / N               DAPO
      token-sum                m
      seq-mean-token-sum       m / B+              REINFORCE, RLOO
      seq-mean-token-sum-norm  m / (B+ * norm)     Dr.GRPO (2503.20783); norm is a configured length
      seq-mean-token-mean      m / (n_i * B+)      GRPO (2402.03300), GSPO

    Denominators are those of the whole ``mask``: take the weights of a global minibatch once, and micro-batches and
    devices only add. Sequences without a counted token are left out of the mean over sequences; where nothing counts
    every weight is 0. To *drop* a token or a sequence clear its mask: it leaves numerator and denominator. To
    *re-weight or reject* multiply its value (or its weight): the denominators stay.

    Args:
      mask: ``bool[..., T]``, what enters the loss. Every leading axis counts sequences (``[P, 2, T]`` for pairs).
      mode: one of ``MODES``.
      norm: the constant of "seq-mean-token-sum-norm", required there (never the padded width), refused elsewhere.
      sequence: ``int32[...]``, the sequence a row belongs to, where several rows are one sequence (contexts that
        restart); by default each row is one. Ids outside ``[0, num_sequences)`` are refused by weight 0.
      num_sequences: static bound on ``sequence``.

    Returns:
      ``float32[..., T]``.

    Raises:
      ValueError: unknown ``mode``; ``norm`` missing, not positive, or given to another mode; ``sequence`` without
        ``num_sequences``.
    """
    check_mode(mode, norm)
    mask = jnp.asarray(mask).astype(bool)
    tokens, nonempty, valid = _sequence_counts(mask, sequence, num_sequences)
    weight = (mask & valid[..., None]).astype(jnp.float32)
    if mode == "token-sum":
        return weight
    if mode == "token-mean":
        return weight / jnp.maximum(jnp.sum(weight), 1.0)
    if mode == "seq-mean-token-mean":
        weight = weight / jnp.maximum(tokens, 1.0)[..., None]
    if norm is not None:
        weight = weight / norm
    return weight / jnp.maximum(nonempty, 1.0)


def aggregate(
    x: Array,
    mask: Array,
    mode: str,
    *,
    norm: Array | float | None = None,
    sequence: Array | None = None,
    num_sequences: int | None = None,
) -> Array:
    """``sum(aggregation_weights(mask, mode, ...) * x)``: one number from per-token values ``x`` ``[..., T]``.

    Values outside the mask may be anything. Arguments and errors are those of ``aggregation_weights``; a shape of
    ``x`` other than the mask's is a ValueError (a per-sequence value never broadcasts over tokens by accident).
    """
    if jnp.shape(x) != jnp.shape(mask):
        raise ValueError(f"x has shape {jnp.shape(x)}, the mask {jnp.shape(mask)}: they must be equal.")
    weights = aggregation_weights(mask, mode, norm=norm, sequence=sequence, num_sequences=num_sequences)
    return jnp.sum(weights * fill(x, mask))


def check_mode(mode: str, norm: Array | float | None) -> None:
    """Refuses an aggregation that ``aggregation_weights`` cannot compute.

    Raises:
      ValueError: unknown ``mode``; ``norm`` missing, not positive, or given to another mode.
    """
    if mode not in MODES:
        raise ValueError(f"Unknown aggregation mode {mode!r}. Known modes: {', '.join(MODES)}.")
    if (norm is not None) != (mode == "seq-mean-token-sum-norm"):
        need = "needs" if norm is None else "takes no"
        raise ValueError(f"Aggregation mode {mode!r} {need} norm=, a constant length.")
    if isinstance(norm, int | float | np.number) and not norm > 0:
        raise ValueError(f"norm must be positive, got {norm}.")


def _sequence_counts(mask: Array, sequence: Array | None, num: int | None) -> tuple[Array, Array, Array]:
    """Tokens of each row's sequence ``[...]``, the number of non-empty sequences, and which rows are valid."""
    row = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    if sequence is None:
        return row, jnp.sum(row > 0, dtype=jnp.float32), jnp.ones(row.shape, bool)
    if num is None:
        raise ValueError("sequence= needs num_sequences=, a static bound on its ids.")
    valid = (sequence >= 0) & (sequence < num)
    tokens = jax.ops.segment_sum(jnp.where(valid, row, 0.0).ravel(), jnp.where(valid, sequence, 0).ravel(), num)
    return tokens[jnp.where(valid, sequence, 0)], jnp.sum(tokens > 0, dtype=jnp.float32), valid
