"""The codec contract: bytes to token ids and back, inside XLA, with control ids that no text can produce."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agentrl_jax.types import Array, Text


class Codec(NamedTuple):
    """Joins environments, which speak bytes, to models, which speak tokens; hashable and static.

    A stream is ``start, open_observation, text..., open_action, action..., end_action, open_observation, ...``.

    Attributes:
      name: what a checkpoint records.
      vocab_size: ids are in ``[0, vocab_size)``.
      pad, start, end_action, open_observation, open_action: control ids outside the range of text.
      sampleable: ``bool`` per id as a tuple: what a policy may write (text and ``end_action``). The same mask is
        used in sampling and scoring.
      max_tokens: ``(bytes) -> int``, a static bound on the tokens of a text of that capacity.
      encode: ``(Text) -> (int32[max_tokens(C)], int32[])``, ids (pad beyond the length) and their number; text alone,
        never a control id.
      decode: ``(int32[L], int32[], capacity) -> Text``, the bytes of the first ``length`` ids; control and unknown
        ids are skipped, what does not fit is dropped.
    """

    name: str
    vocab_size: int
    pad: int
    start: int
    end_action: int
    open_observation: int
    open_action: int
    sampleable: tuple[bool, ...]
    max_tokens: Callable[[int], int]
    encode: Callable[[Text], tuple[Array, Array]]
    decode: Callable[[Array, Array, int], Text]
