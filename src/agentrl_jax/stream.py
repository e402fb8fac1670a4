"""The token stream: what a slot of the rollout carries, and the few ways it grows.

Each row of the stream either samples a token or is fed one. ``tokens[:length]`` is the truth, ``tokens[:cached]`` is
what the model has processed; so what is still to be fed is simply what lies between. There is no padding inside a
row, and position is index.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.codecs.base import Codec
from agentrl_jax.types import Array, PyTree, Text

IDLE, RUN, WAIT, DONE = 0, 1, 2, 3
"""Phases of a slot: no episode; fed or sampling; action closed, environment to be stepped; cut by ``max_tokens``."""

_WRITTEN, _EXPERT, _TURN = 1, 2, 4


class Slots(NamedTuple):
    """``S`` rows in play.

    Attributes:
      episode, segment, phase: which episode the slot plays, which row of it, and what it does.
      length, cached: tokens in the stream, and how many of them the model has processed.
      began: position of the first token of the current action.
      turn, written: actions closed, and tokens written by the agent, in this episode.
      age: iterations spent waiting.
      cut: the current action met its budget.
      truncated: the row met ``max_tokens``.
      hidden: ``[S, D]``, from which the next token's logits are read.
      tokens, meta, logp, reward: ``[S, T]``; meta packs the turn and the written and expert flags.
      steps, record: per turn.
      env: environment state.
    """

    episode: Array
    segment: Array
    phase: Array
    length: Array
    cached: Array
    began: Array
    turn: Array
    written: Array
    age: Array
    cut: Array
    truncated: Array
    hidden: PyTree
    tokens: Array
    meta: Array
    logp: Array
    reward: Array
    steps: dict[str, Array]
    record: PyTree
    env: PyTree


def pack(written: Array, expert: Array, turn: Array) -> Array:
    """``meta [B, T]`` of which ``unpack`` gives these back, wherever ``turn`` is not -1."""
    return jnp.maximum(turn, 0) * _TURN + written * _WRITTEN + expert * _EXPERT


def unpack(meta: Array, length: Array) -> tuple[Array, Array, Array]:
    """``(written, expert, turn)`` of ``meta [B, T]``; turn is -1 at and beyond ``length [B]``."""
    real = jnp.arange(meta.shape[-1], dtype=jnp.int32) < length[:, None]
    return (meta & _WRITTEN) > 0, (meta & _EXPERT) > 0, jnp.where(real, meta // _TURN, -1)


def gather(tree: PyTree, rows: Array) -> PyTree:
    """Rows of every leaf; out-of-range indices give some row, to be dropped by ``scatter``."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), tree)


def scatter(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    """Writes rows of every leaf; out-of-range indices are dropped."""
    return jax.tree.map(lambda x, v: x.at[rows].set(v, mode="drop"), tree, values)


def where(mask: Array, a: PyTree, b: PyTree) -> PyTree:
    """Row-wise select between two trees, ``mask [B]``."""
    return jax.tree.map(lambda x, y: jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, y), a, b)


def append(slots: Slots, ids: Array, count: Array, *, written: bool = False) -> Slots:
    """Appends the first ``count [B]`` of ``ids [B, L]`` (as the expert's words if ``written``), as far as they fit."""
    capacity = slots.tokens.shape[1]
    count = jnp.minimum(count, capacity - slots.length)
    index = jnp.arange(capacity, dtype=jnp.int32) - slots.length[:, None]
    new = (index >= 0) & (index < count[:, None])
    values = jnp.take_along_axis(ids, jnp.clip(index, 0, ids.shape[1] - 1), axis=1)
    meta = slots.turn * _TURN + (_WRITTEN + _EXPERT if written else 0)
    return slots._replace(
        tokens=jnp.where(new, values, slots.tokens),
        meta=jnp.where(new, meta[:, None], slots.meta),
        length=slots.length + count,
        written=slots.written + (count if written else 0),
    )


def append_sample(slots: Slots, ready: Array, token: Array, logp: Array) -> Slots:
    """Appends one sampled token to every ``ready [S]`` row."""
    here = (jnp.arange(slots.tokens.shape[1], dtype=jnp.int32) == slots.length[:, None]) & ready[:, None]
    return slots._replace(
        tokens=jnp.where(here, token[:, None], slots.tokens),
        meta=jnp.where(here, slots.turn[:, None] * _TURN + _WRITTEN, slots.meta),
        logp=jnp.where(here, logp[:, None], slots.logp),
        length=slots.length + ready,
        written=slots.written + ready,
    )


def observation_block(codec: Codec, text: Text, first: Array) -> tuple[Array, Array]:
    """Ids that open a turn, batched: ``[start] open_observation text open_action`` and their number; start where
    ``first``."""
    ids, length = jax.vmap(codec.encode)(text)
    batch, width = ids.shape
    pad = jnp.full((batch, 1), codec.pad, jnp.int32)
    block = jnp.concatenate([jnp.full((batch, 1), codec.open_observation, jnp.int32), ids, pad], axis=1)
    at = jnp.arange(width + 2, dtype=jnp.int32)
    block = jnp.where(at == length[:, None] + 1, codec.open_action, block)
    shifted = jnp.concatenate([jnp.full((batch, 1), codec.start, jnp.int32), block], axis=1)
    plain = jnp.concatenate([block, pad], axis=1)
    return jnp.where(first[:, None], shifted, plain), length + 2 + first


def action_block(codec: Codec, text: Text, budget: int) -> tuple[Array, Array]:
    """Ids of an action by the expert, batched: ``text end_action``, cut to ``budget`` ids, and their number."""
    ids, length = jax.vmap(codec.encode)(text)
    ids = jnp.concatenate([ids, jnp.full((ids.shape[0], 1), codec.pad, jnp.int32)], axis=1)
    at = jnp.arange(ids.shape[1], dtype=jnp.int32)
    ids = jnp.where(at == length[:, None], codec.end_action, ids)
    return ids[:, :budget], jnp.minimum(length + 1, budget)


def action_text(codec: Codec, slots: Slots, budget: int, capacity: int) -> Text:
    """What the agent wrote since ``began``, batched, without the end marker."""
    capacity_tokens = slots.tokens.shape[1]
    index = slots.began[:, None] + jnp.arange(budget, dtype=jnp.int32)
    ids = jnp.take_along_axis(slots.tokens, jnp.minimum(index, capacity_tokens - 1), axis=1)
    return jax.vmap(lambda i, n: codec.decode(i, n, capacity))(ids, jnp.clip(slots.length - slots.began, 0, budget))
