"""Rotary positions and grouped-query attention, as plain functions.

Names carry shapes: B rows, T positions of a row or cache, C tokens of a chunk, H query heads, K kv heads, G = H / K,
M = G * C, d head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.types import Array

_MASKED = -1e30
_TERMS = 8


def rope_angles(position_BxC: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosine and sine ``float32[B, C, head_dim / 2]`` of ``position / theta^(2 i / head_dim)``.

    Rotary position embedding (Su et al., 2021, arXiv:2104.09864).
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position_BxC[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BxCxHxd: Array, angles: tuple[Array, Array]) -> Array:
    """Turns the pairs ``(x[i], x[i + d / 2])``: the half-split convention of Llama weights."""
    cos, sin = (a[:, :, None, :] for a in angles)
    x1, x2 = jnp.split(x_BxCxHxd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BxCxHxd.dtype)


def grouped_attention(q_BxCxHxd: Array, k_BxKxdxT: Array, v_BxKxTxd: Array, position_BxC: Array) -> Array:
    """Attention of each query to the positions up to its own: ``softmax(q k / sqrt(d)) v``, softmax in float32.

    Query head ``h`` reads kv head ``h // G``: the ``G`` query heads of a kv head become rows of one matrix product, so
    keys and values are never repeated.
    """
    B, C, H, d = q_BxCxHxd.shape
    K, T = v_BxKxTxd.shape[1:3]
    M = H // K * C
    q_BxKxMxd = (q_BxCxHxd * d**-0.5).reshape(B, C, K, H // K, d).transpose(0, 2, 3, 1, 4).reshape(B, K, M, d)
    score_BxKxMxT = jnp.einsum("bkmd,bkdt->bkmt", q_BxKxMxd, k_BxKxdxT, preferred_element_type=jnp.float32)
    seen_BxCxT = jnp.arange(T)[None, None, :] <= position_BxC[:, :, None]
    seen_Bx1xMxT = jnp.broadcast_to(seen_BxCxT[:, None], (B, H // K, C, T)).reshape(B, 1, M, T)
    weight_BxKxMxT = jax.nn.softmax(jnp.where(seen_Bx1xMxT, score_BxKxMxT, _MASKED), axis=-1)
    out_BxKxMxd = jnp.einsum("bkmt,bktd->bkmd", weight_BxKxMxT.astype(v_BxKxTxd.dtype), v_BxKxTxd)
    return out_BxKxMxd.reshape(B, K, H // K, C, d).transpose(0, 3, 1, 2, 4).reshape(B, C, H, d)


def decode_attention(q_Bx1xHxd: Array, k_BxKxdxT: Array, v_BxKxTxd: Array, position_Bx1: Array) -> Array:
    """``grouped_attention`` of one token a row, from keys stored with positions last.

    Both products are written as sums of ``d`` and of 8 terms, element-wise along the contiguous axis: XLA fuses each
    with the slice that its operand is, so a prefix of the cache is read once and never copied, and the loops vectorise. One
    matrix product a row and head took twice as long on CPU.
    """
    B, _, H, d = q_Bx1xHxd.shape
    K, _, T = k_BxKxdxT.shape[1:]
    q_BxKxGxd = (q_Bx1xHxd * d**-0.5).reshape(B, K, H // K, d).astype(jnp.float32)
    score_BxKxGxT = sum(q_BxKxGxd[..., i, None] * k_BxKxdxT[:, :, None, i] for i in range(d))
    seen_Bx1x1xT = jnp.arange(T)[None, None, None, :] <= position_Bx1[:, :, None, None]
    weight_BxKxGxT = jax.nn.softmax(jnp.where(seen_Bx1x1xT, score_BxKxGxT, _MASKED), axis=-1)
    out_BxKxGxd = _sum_positions(weight_BxKxGxT, v_BxKxTxd)
    return out_BxKxGxd.reshape(B, 1, H, d).astype(q_Bx1xHxd.dtype)


def _sum_positions(weight_BxKxGxT: Array, v_BxKxTxd: Array) -> Array:
    """``sum_t weight[t] v[t]``: every eighth position with its weight, then the partial sums."""
    whole = v_BxKxTxd.shape[2] // _TERMS * _TERMS
    parts = [
        weight_BxKxGxT[..., i:whole:_TERMS, None] * v_BxKxTxd[:, :, None, i:whole:_TERMS]
        for i in range(_TERMS if whole else 0)
    ]
    rest = [weight_BxKxGxT[..., i, None] * v_BxKxTxd[:, :, None, i] for i in range(whole, v_BxKxTxd.shape[2])]
    return sum(_slices(sum(parts)) + rest if parts else rest)


def _slices(x: Array) -> list[Array]:
    """The entries of axis -2, added up in groups of eight while there are many."""
    while x.shape[-2] > 4 * _TERMS:
        whole = x.shape[-2] // _TERMS * _TERMS
        rest = x[..., whole:, :]
        x = jnp.concatenate([sum(x[..., i:whole:_TERMS, :] for i in range(_TERMS)), rest], axis=-2)
    return [x[..., i, :] for i in range(x.shape[-2])]
