"""One token per byte: ids 0 to 255 are the bytes, five control ids follow, which no text can produce."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from agentrl_jax.codecs.base import Codec
from agentrl_jax.types import Array, Text

BYTES = 256
PAD, START, END_ACTION, OPEN_OBSERVATION, OPEN_ACTION = range(BYTES, BYTES + 5)
MIN_VOCAB = BYTES + 5


@functools.cache
def byte(vocab_size: int = 264) -> Codec:
    """The byte codec; the same arguments return the identical object.

    Ids: 0..255 bytes, 256 pad, 257 start, 258 end_action, 259 open_observation, 260 open_action. Ids from 261 to
    ``vocab_size - 1`` only round the vocabulary up to a size that multiplies well, and are never sampleable.

    Raises:
      ValueError: ``vocab_size`` is smaller than 261.
    """
    if vocab_size < MIN_VOCAB:
        raise ValueError(
            f"vocab_size={vocab_size}: the byte codec needs at least {MIN_VOCAB} (256 bytes and 5 control ids)"
        )
    return Codec(
        name="byte",
        vocab_size=vocab_size,
        pad=PAD,
        start=START,
        end_action=END_ACTION,
        open_observation=OPEN_OBSERVATION,
        open_action=OPEN_ACTION,
        sampleable=tuple(i < BYTES or i == END_ACTION for i in range(vocab_size)),
        max_tokens=_max_tokens,
        encode=encode,
        decode=decode,
    )


def _max_tokens(capacity: int) -> int:
    return capacity


def encode(text: Text) -> tuple[Array, Array]:
    """Bytes to ids: ``Text of capacity C -> (int32[C], int32[])``, pad beyond the length."""
    used = jnp.arange(text.data.shape[0]) < text.length
    return jnp.where(used, text.data.astype(jnp.int32), PAD), text.length.astype(jnp.int32)


def decode(ids: Array, length: Array, capacity: int) -> Text:
    """The bytes among the first ``length`` ids: ``(int32[L], int32[], int) -> Text of capacity``.

    Ids outside 0..255 are skipped and what follows moves up; bytes beyond ``capacity`` are dropped.
    """
    is_byte = (jnp.arange(ids.shape[0]) < length) & (ids >= 0) & (ids < BYTES)
    slot = jnp.where(is_byte, jnp.cumsum(is_byte, dtype=jnp.int32) - 1, capacity)
    data = jnp.zeros(capacity, jnp.uint8).at[slot].set(jnp.clip(ids, 0, BYTES - 1).astype(jnp.uint8), mode="drop")
    return Text(data, jnp.minimum(jnp.sum(is_byte, dtype=jnp.int32), capacity))
