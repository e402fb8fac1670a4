"""Rotary positions and grouped-query attention, as plain functions.

Names carry shapes: B rows, T positions of a row or cache, C tokens of a chunk, H query heads, K kv heads, G = H / K,
M = G * C, d head width.
"""

from __future__ import annotations

import functools

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


def decode_attention(q_Bx1xHxd: Array, k_BxKxdxT: Array, v_BxKxTxd: Array, position_Bx1: Array, size: int) -> Array:
    """``grouped_attention`` of one token a row to the first ``size`` positions of a cache whose keys have them last.

    Both products are written as sums of ``d`` and of 8 terms, element-wise along the contiguous axis. XLA fuses such a
    sum with the slices it reads, so a prefix of the cache is read once and never copied, and the loops vectorise: on
    CPU 2.5 times as fast as a matrix product for each row and head.
    """
    B, _, H, d = q_Bx1xHxd.shape
    K = k_BxKxdxT.shape[1]
    q_BxKxGxd = (q_Bx1xHxd * d**-0.5).reshape(B, K, H // K, d)
    score_BxKxGxT = _sum([q_BxKxGxd[..., i, None] * k_BxKxdxT[:, :, None, i, :size] for i in range(d)])
    seen_Bx1x1xT = jnp.arange(size)[None, None, None, :] <= position_Bx1[:, :, None, None]
    weight_BxKxGxT = jax.nn.softmax(jnp.where(seen_Bx1x1xT, score_BxKxGxT, _MASKED), axis=-1)
    return _sum_positions(weight_BxKxGxT, v_BxKxTxd, size).reshape(B, 1, H, d).astype(q_Bx1xHxd.dtype)


def _sum(terms: list[Array]) -> Array:
    return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in terms))


def _sum_positions(weight_BxKxGxT: Array, v_BxKxTxd: Array, size: int) -> Array:
    """``sum_t weight[t] v[t]`` over ``t < size``: sums of eight neighbours, then of those, then the rest."""
    terms = []
    whole, reach = size // _TERMS, v_BxKxTxd.shape[2] // _TERMS
    if whole:
        # Split before slicing: the split is free, while a slice before it would be copied.
        v = v_BxKxTxd[:, :, : reach * _TERMS].reshape(*v_BxKxTxd.shape[:2], 1, reach, _TERMS, -1)[:, :, :, :whole]
        weight = weight_BxKxGxT[..., : whole * _TERMS].reshape(*weight_BxKxGxT.shape[:3], whole, _TERMS)
        partial = _sum([weight[..., i, None] * v[..., i, :] for i in range(_TERMS)])
        terms += [partial[..., i, :] for i in range(whole)]
    terms += [weight_BxKxGxT[..., i, None] * v_BxKxTxd[:, :, None, i] for i in range(whole * _TERMS, size)]
    return _sum(terms)
