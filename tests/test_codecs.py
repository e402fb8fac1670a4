import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.codecs import byte, check_codec
from agentrl_jax.types import Text

CODEC = byte()
encode = jax.jit(CODEC.encode)
decode = jax.jit(CODEC.decode, static_argnums=2)


def text(data: bytes, capacity: int = 16) -> Text:
    return Text(jnp.asarray(np.frombuffer(data.ljust(capacity, b"\0"), np.uint8)), jnp.int32(len(data)))


@pytest.mark.parametrize("vocab_size", [261, 264, 512])
def test_byte_conforms(vocab_size):
    check_codec(byte(vocab_size), ["Grüße".encode(), b"7*6=42\n"])


def test_byte_ids():
    assert (CODEC.pad, CODEC.start, CODEC.end_action, CODEC.open_observation, CODEC.open_action) == (
        256,
        257,
        258,
        259,
        260,
    )
    assert byte(264) is byte(264)
    assert sum(CODEC.sampleable) == 257 and CODEC.max_tokens(31) == 31
    ids, count = encode(text(b"\x00a\xff"))
    assert ids[:4].tolist() == [0, 97, 255, 256] and count == 3


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size=260.*261"):
        byte(260)


def test_decode_skips_controls_and_drops_overflow():
    ids = jnp.array([257, 104, 260, 105, 258, -1, 33, 300, 63, 7], jnp.int32)
    out = decode(ids, jnp.int32(9), 16)
    assert bytes(out.data[: out.length]) == b"hi!?"
    out = decode(ids, jnp.int32(9), 3)
    assert bytes(out.data) == b"hi!" and out.length == 3


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 263), min_size=12, max_size=12), st.integers(0, 12))
def test_decode_is_the_plain_filter(ids, length):
    expected = bytes(i for i in ids[:length] if 0 <= i < 256)[:8]
    out = decode(jnp.array(ids, jnp.int32), jnp.int32(length), 8)
    assert bytes(out.data[: out.length]) == expected and not np.any(out.data[out.length :])


def drop_controls(codec):
    return codec._replace(sampleable=tuple(True for _ in codec.sampleable))


def forged(codec):
    def encode(text):
        ids, count = codec.encode(text)
        return jnp.where(ids == 10, codec.end_action, ids), count

    return codec._replace(encode=encode)


def greedy_decode(codec):
    return codec._replace(
        decode=lambda ids, length, capacity: Text(
            jnp.resize(ids, capacity).astype(jnp.uint8), jnp.minimum(length, capacity)
        )
    )


@pytest.mark.parametrize(
    ("broken", "message"), [(drop_controls, "sampleable"), (forged, "control ids"), (greedy_decode, "decode")]
)
def test_check_codec_finds_faults(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_codec(broken(byte()))
