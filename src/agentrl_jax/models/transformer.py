"""A decoder-only transformer in Flax Linen whose cache is an argument and a result, never hidden state.

Names carry shapes: B rows, T positions of a row or cache, C tokens of a chunk, D width, H query heads, K kv heads,
G = H / K, M = G * C, d head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from agentrl_jax.models import cache as kv
from agentrl_jax.models.attention import decode_attention, grouped_attention, rope_angles, rotate
from agentrl_jax.models.config import TransformerConfig
from agentrl_jax.types import Array


def _dense(config: TransformerConfig, features: int, name: str, scale: float = 1.0) -> nn.Dense:
    """A linear map without bias, outputs of variance ``scale^2`` from inputs of variance 1."""
    init = nn.initializers.variance_scaling(scale**2, "fan_in", "normal")
    return nn.Dense(features, False, config.dtype, config.param_dtype, kernel_init=init, name=name)


def _residual_scale(config: TransformerConfig) -> float:
    """Keeps the variance of the residual stream independent of depth (Radford et al., 2019, GPT-2)."""
    return (2 * config.layers) ** -0.5


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * scale``, computed in float32 (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[..., D] -> [..., D]``."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.config.param_dtype)
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.norm_eps)
        return (unit * scale.astype(jnp.float32)).astype(self.config.dtype)


class Where(NamedTuple):
    """Positions of a chunk, their rotary angles and, with a cache, the slots they take in it."""

    position: Array
    angles: tuple[Array, Array]
    slots: kv.Slots | None = None


def _attend(q: Array, layer: kv.LayerCache, position: Array, size: int) -> Array:
    if q.shape[1] == 1:
        return decode_attention(q, layer.k, layer.v, position, size)
    return grouped_attention(q, layer.k[..., :size], layer.v[:, :, :size], position)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; queries, keys and values come from one matrix product."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BxCxD: Array, where: Where, layer: kv.LayerCache | None) -> tuple[Array, kv.LayerCache | None]:
        """Without a cache the tokens attend among themselves, with one to all that it holds."""
        c = self.config
        qkv = _dense(c, (c.heads + 2 * c.kv_heads) * c.head_dim, "qkv")(x_BxCxD)
        qkv = qkv.reshape(*x_BxCxD.shape[:2], c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = qkv[:, :, : c.heads + c.kv_heads], qkv[:, :, c.heads + c.kv_heads :]
        qk = rotate(qk, where.angles)
        q, k = qk[:, :, : c.heads], qk[:, :, c.heads :]
        if layer is None or where.slots is None:
            out = grouped_attention(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), where.position)
        else:
            layer = kv.write(layer, k, v, where.slots.index)
            sizes = kv.widths(c, layer.v.shape[2])
            out = kv.read(layer, lambda layer, size: _attend(q, layer, where.position, size), where.slots.needed, sizes)
        out = out.reshape(*x_BxCxD.shape[:2], c.heads * c.head_dim)
        return _dense(c, c.width, "out", _residual_scale(c))(out), layer


class FeedForward(nn.Module):
    """SwiGLU, ``(silu(x W_gate) * x W_up) W_down`` (Shazeer, 2020, arXiv:2002.05202)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BxCxD: Array) -> Array:
        """``[B, C, D] -> [B, C, D]``."""
        c = self.config
        gate, up = jnp.split(_dense(c, 2 * c.mlp_width, "gate_up")(x_BxCxD), 2, axis=-1)
        return _dense(c, c.width, "down", _residual_scale(c))(nn.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Array, where: Where, layer: kv.LayerCache | None) -> tuple[Array, kv.LayerCache | None]:
        """``[B, C, D] -> [B, C, D]`` and the layer's cache."""
        c = self.config
        mixed, layer = Attention(c, name="attention")(RMSNorm(c, name="norm_attention")(x), where, layer)
        x = x + mixed
        return x + FeedForward(c, name="feed_forward")(RMSNorm(c, name="norm_feed_forward")(x)), layer


class Transformer(nn.Module):
    """Pre-norm blocks between an embedding and a final norm; ``logits`` applies the output head."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declares every parameter, so that any method initialises them all."""
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        self.embedding = self.param("embedding", init, (c.vocab_size, c.width), c.param_dtype)
        self.head = self.embedding if c.tied else self.param("head", init, (c.vocab_size, c.width), c.param_dtype)
        self.blocks = [Block(c) for _ in range(c.layers)]
        self.final_norm = RMSNorm(c)
        if c.value_head:
            zeros = nn.initializers.zeros
            self.value = nn.Dense(1, dtype=jnp.float32, param_dtype=c.param_dtype, kernel_init=zeros)

    def __call__(self, tokens_BxT: Array) -> tuple[Array, Array]:
        """The training pass: hidden ``[B, T, D]`` and value ``float32[B, T]``; position is the index."""
        position = jnp.arange(tokens_BxT.shape[1])[None, :]
        hidden, value, _ = self._run(tokens_BxT, self._where(position), None)
        return hidden, value

    def extend(
        self, cache: kv.Cache, tokens_BxC: Array, start_B: Array, count_B: Array
    ) -> tuple[Array, Array, kv.Cache]:
        """Appends the first ``count`` tokens of each row at ``start`` and returns hidden, value and the new cache."""
        chunk, capacity = tokens_BxC.shape[1], cache[0].v.shape[2]
        slots = kv.slots(start_B, count_B, chunk, capacity)
        where = self._where(start_B[:, None] + jnp.arange(chunk)[None, :], slots)
        # Tokens that do not exist may be any number; they must not leave the table.
        tokens_BxC = jnp.where(jnp.arange(chunk)[None, :] < count_B[:, None], tokens_BxC, 0)
        return self._run(tokens_BxC, where, cache)

    def logits(self, hidden: Array) -> Array:
        """``[..., D] -> float32[..., V]``."""
        head = self.head.astype(self.config.dtype)
        return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)

    def _where(self, position: Array, slots: kv.Slots | None = None) -> Where:
        return Where(position, rope_angles(position, self.config.head_dim, self.config.rope_theta), slots)

    def _run(self, tokens: Array, where: Where, cache: kv.Cache | None):
        # Unsigned, so that a negative id does not wrap around: one outside the table gives NaN, which can be seen.
        ids = tokens.astype(jnp.uint32)
        x = jnp.take(self.embedding, ids, axis=0, mode="fill", fill_value=jnp.nan).astype(self.config.dtype)
        layers = []
        for i, block in enumerate(self.blocks):
            x, layer = block(x, where, None if cache is None else cache[i])
            layers.append(layer)
        hidden = self.final_norm(x)
        value = self.value(hidden)[..., 0] if self.config.value_head else jnp.zeros(hidden.shape[:2], jnp.float32)
        return hidden, value, tuple(layers)
