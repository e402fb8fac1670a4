"""A policy in plain functions that compiles fast, and what the tests of the core share.

One attention head over the embeddings, as small as a policy with a cache can be. Its parameters hold a bias on the
logits, so that one program plays scripted, random and greedy policies alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import codecs
from agentrl_jax.policy import Output, Policy

CODEC = codecs.byte()
WIDTH = 16


def _init(key):
    names = ("embed", "position", "query", "key", "out", "head")
    shapes = (
        (CODEC.vocab_size, WIDTH),
        (256, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH, CODEC.vocab_size),
    )
    params = {n: 0.4 * jax.random.normal(k, s) for n, k, s in zip(names, jax.random.split(key, 6), shapes, strict=True)}
    return params | {"bias": jnp.zeros(CODEC.vocab_size), "value": jnp.zeros(WIDTH), "value_bias": jnp.zeros(())}


def _attend(params, x, keys, position):
    """``x [B, C, D]`` at ``position [B, C]`` reads ``keys [B, T, D]`` up to itself."""
    score = jnp.einsum("bcd,btd->bct", x @ params["query"], keys @ params["key"])
    seen = jnp.arange(keys.shape[1]) <= position[..., None]
    weight = jax.nn.softmax(jnp.where(seen, score, -1e30), axis=-1)
    hidden = jnp.tanh(x + jnp.einsum("bct,btd->bcd", weight, keys) @ params["out"])
    return Output(hidden, hidden @ params["value"] + params["value_bias"])


def _embed(params, tokens, position):
    return params["embed"][tokens] + params["position"][jnp.minimum(position, 255)]


def _forward(params, tokens, inputs=None):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = _embed(params, tokens, position)
    return _attend(params, x, x, position)


def _extend(params, cache, tokens, start, count, inputs=None):
    offset = jnp.arange(tokens.shape[1])
    position = start[:, None] + offset
    x = _embed(params, tokens, position)
    at = jnp.where(offset < count[:, None], position, cache.shape[1])
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], at].set(x, mode="drop")
    return _attend(params, x, cache, position), cache


def _logits(params, hidden):
    return hidden @ params["head"] + params["bias"]


POLICY = Policy(_init, _forward, _logits, lambda batch, capacity: jnp.zeros((batch, capacity, WIDTH)), _extend, True)


@functools.cache
def params(seed: int = 0):
    return _init(jax.random.key(seed))


def biased(favoured: bytes, by: float = 4.0, end: float = 4.0, seed: int = 0):
    """Parameters whose policy favours these bytes and the end of the action."""
    bias = np.zeros(CODEC.vocab_size, np.float32)
    bias[list(favoured)] = by
    bias[CODEC.end_action] = end
    return params(seed) | {"bias": jnp.asarray(bias)}
