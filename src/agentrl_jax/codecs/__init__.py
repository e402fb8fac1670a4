"""Codecs: bytes to token ids and back, inside XLA."""

from agentrl_jax.codecs.base import Codec
from agentrl_jax.codecs.byte import byte
from agentrl_jax.codecs.testing import check_codec

__all__ = ["Codec", "byte", "check_codec"]
