"""The key-value cache: an explicit pytree, head-major, one entry a layer, written in place inside loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import control
from agentrl_jax.models.config import TransformerConfig
from agentrl_jax.types import Array


class LayerCache(NamedTuple):
    """Keys (already rotated) ``k [B, kv_heads, head_dim, T]`` and values ``v [B, kv_heads, T, head_dim]`` of one layer.

    Each has the axis last along which ``attention.decode_attention`` runs, so that its loops are contiguous.
    """

    k: Array
    v: Array


Cache = tuple[LayerCache, ...]
"""One entry a layer. Layers are never stacked: a scan over them would copy the whole cache at every token."""


def init_cache(config: TransformerConfig, batch: int, capacity: int) -> Cache:
    """An empty cache for ``batch`` rows of ``capacity`` positions; every leaf is its own buffer."""
    k = (batch, config.kv_heads, config.head_dim, capacity)
    v = (batch, config.kv_heads, capacity, config.head_dim)
    return tuple(LayerCache(jnp.zeros(k, config.dtype), jnp.zeros(v, config.dtype)) for _ in range(config.layers))


class Slots(NamedTuple):
    """``index int32[B, C]``, where tokens are written (capacity: nowhere); ``needed int32[B]``, positions to read."""

    index: Array
    needed: Array


def slots(start: Array, count: Array, chunk: int, capacity: int) -> Slots:
    """The slots of tokens ``start .. start + count - 1`` of each row, as far as the capacity reaches."""
    offset = jnp.arange(chunk)[None, :]
    position = start[:, None] + offset
    exists = (offset < count[:, None]) & (position >= 0) & (position < capacity)
    return Slots(jnp.where(exists, position, capacity), jnp.where(count > 0, start + count, 0))


def write(layer: LayerCache, k_BxCxKxd: Array, v_BxCxKxd: Array, slots_BxC: Array) -> LayerCache:
    """Scatters keys and values to their slots; slots out of range are dropped.

    On CPU this runs as one loop over the ``B * C`` tokens, in place, which measured 3.5 times faster than a select
    over the whole cache.
    """
    rows_Bx1 = jnp.arange(slots_BxC.shape[0])[:, None]
    k = layer.k.at[rows_Bx1, :, :, slots_BxC].set(k_BxCxKxd.astype(layer.k.dtype), mode="drop")
    v = layer.v.at[rows_Bx1, :, slots_BxC].set(v_BxCxKxd.astype(layer.v.dtype), mode="drop")
    return LayerCache(k, v)


def widths(config: TransformerConfig, capacity: int) -> tuple[int, ...]:
    """Static prefix widths at which attention reads a cache, the last one the capacity itself.

    Quarters of the capacity rounded up to a multiple of 16, or ``config.cache_widths`` as far as they fit.
    """
    wanted = config.cache_widths or [-(-capacity * quarter // 64) * 16 for quarter in (1, 2, 3)]
    return (*sorted({w for w in wanted if w < capacity}), capacity)


def read(layer: LayerCache, attend: Callable[[LayerCache, int], Array], needed: Array, sizes: tuple[int, ...]) -> Array:
    """``attend(layer, size)`` over the smallest prefix of ``sizes`` that holds ``max(needed)`` positions.

    The cache is only read inside the branches: a branch that returned one would copy it at every token.
    """

    def at(size):
        return lambda layer: attend(layer, size)

    if len(sizes) == 1:
        return attend(layer, sizes[0])
    return jax.lax.switch(control.width_index(sizes, needed), [at(size) for size in sizes], layer)
