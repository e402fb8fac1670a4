"""Conformance of a codec, for every codec of the package and for users' own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.codecs.base import Codec
from agentrl_jax.types import Text

_CAPACITY = 64
_CONTROLS = ("pad", "start", "end_action", "open_observation", "open_action")


def check_codec(codec: Codec, texts: Sequence[bytes] = (), *, seed: int = 0) -> None:
    """Checks the contract of ``Codec``: control ids, sampleable ids, round trips, and decoding of arbitrary ids.

    Args:
      codec: what to check.
      texts: more byte strings that must survive a round trip, of at most 64 bytes.
      seed: of the random byte strings and ids.

    Raises:
      AssertionError: what is violated, with the offending text or ids.
    """
    _check_ids(codec)
    rng = np.random.default_rng(seed)
    random = [rng.integers(0, 256, rng.integers(0, _CAPACITY + 1), np.uint8).tobytes() for _ in range(20)]
    names = [f"<|{name}|> </{name}> {getattr(codec, name)}".encode() for name in _CONTROLS]
    extremes = [b"", b"\0" * _CAPACITY, b"\xff" * _CAPACITY, "\u20ac \U0001f600".encode()]
    for text in [*texts, *random, *names, *extremes]:
        _check_round_trip(codec, text)
    _check_any_ids(codec, rng)


def _check_ids(codec: Codec) -> None:
    controls = {name: getattr(codec, name) for name in _CONTROLS}
    assert len(set(controls.values())) == len(controls), f"control ids are not distinct: {controls}"
    for name, value in controls.items():
        assert 0 <= value < codec.vocab_size, f"{name}={value} is outside [0, {codec.vocab_size})"
    count = len(codec.sampleable)
    assert count == codec.vocab_size, f"sampleable has {count} entries for vocab_size={codec.vocab_size}"
    for name, value in controls.items():
        expected = name == "end_action"
        assert codec.sampleable[value] is expected, (
            f"sampleable[{name}] must be {expected}: only end_action may be written"
        )
    assert hash(codec) == hash(codec), "a codec must be hashable: it is a static argument"


def _check_round_trip(codec: Codec, text: bytes) -> None:
    assert len(text) <= _CAPACITY, f"texts may have at most {_CAPACITY} bytes, not {len(text)}"
    ids, count, back = jax.device_get(_round_trip(codec, _text(text)))
    used, count = ids[:count], int(count)
    assert ids.shape == (codec.max_tokens(_CAPACITY),), f"encode gave {ids.shape[0]} ids, max_tokens says otherwise"
    assert 0 <= count <= ids.shape[0], f"encode gave the length {count} for {text!r}"
    assert np.all(ids[count:] == codec.pad), f"ids beyond the length are not pad for {text!r}"
    forged = [name for name in _CONTROLS if getattr(codec, name) in used]
    assert not forged, f"text {text!r} produced the control ids {forged}"
    barred = [int(i) for i in used if not codec.sampleable[i]]
    assert not barred, f"text {text!r} produced ids that no policy may write: {barred}"
    got = bytes(back.data[: back.length])
    assert got == text, f"{text!r} came back as {got!r}"


def _check_any_ids(codec: Codec, rng: np.random.Generator) -> None:
    texts = np.flatnonzero(np.array(codec.sampleable))
    texts = texts[texts != codec.end_action]
    each = [np.full(8, i, np.int32) for i in rng.choice(texts, min(32, len(texts)), replace=False)]
    for ids in each:
        assert int(_decode(codec, ids, 1, 64).length) > 0, f"sampleable id {ids[0]} decodes to no bytes"
    wild = rng.integers(-(2**31), 2**31, 8).astype(np.int32)
    controls = np.array([getattr(codec, name) for name in _CONTROLS] + [-1, codec.vocab_size, 2**31 - 1], np.int32)
    for ids in [*each, wild, controls]:
        for length in (0, 3, 8):
            _check_text(_decode(codec, ids, length, 3), 3, ids)
    left = int(_decode(codec, controls, 8, 64).length)
    assert left == 0, f"control and unknown ids {controls.tolist()} decoded to {left} bytes"
    mixed = np.stack([controls, np.resize(texts, 8).astype(np.int32)], axis=1).reshape(-1)
    got, expected = _decode(codec, mixed, 16, 64), _decode(codec, mixed[1::2], 8, 64)
    assert np.array_equal(got.data, expected.data), "control ids between text change the text that is decoded"


def _check_text(text: Text, capacity: int, ids: np.ndarray) -> None:
    data, length = jax.device_get(text)
    assert data.shape == (capacity,) and data.dtype == np.uint8, (
        f"decode gave {data.dtype}{data.shape}, not uint8[{capacity}]"
    )
    assert 0 <= length <= capacity, f"decode of {ids.tolist()} gave the length {length} for a capacity of {capacity}"
    assert not data[length:].any(), f"decode of {ids.tolist()} left bytes beyond the length"


def _text(text: bytes) -> Text:
    data = np.zeros(_CAPACITY, np.uint8)
    data[: len(text)] = np.frombuffer(text, np.uint8)
    return Text(jnp.asarray(data), jnp.int32(len(text)))


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: Codec, text: Text):
    ids, count = codec.encode(text)
    return ids, count, codec.decode(ids, count, _CAPACITY)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _decode(codec: Codec, ids, length, capacity: int) -> Text:
    return codec.decode(ids, length, capacity)
