"""Models behind the ``Policy`` contract; the only package that knows Flax."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from agentrl_jax.models import cache as _cache
from agentrl_jax.models.config import TransformerConfig
from agentrl_jax.models.testing import check_policy
from agentrl_jax.models.transformer import Transformer
from agentrl_jax.policy import Output, Policy
from agentrl_jax.types import Array, PyTree

__all__ = ["TransformerConfig", "check_policy", "transformer_policy"]


@functools.cache
def transformer_policy(config: TransformerConfig) -> Policy:
    """A transformer as a ``Policy``; equal configurations return the identical object, so nothing compiles twice.

    The functions raise ValueError when ``inputs`` (images and the like) are given: this model reads tokens alone.
    """
    model = Transformer(config)

    def apply(params: PyTree, *args, method: str = "__call__") -> Any:
        return model.apply({"params": params}, *args, method=method)

    def init(key: Array) -> PyTree:
        return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def forward(params: PyTree, tokens: Array, inputs: PyTree | None = None) -> Output:
        _refuse(inputs)
        return Output(*apply(params, tokens))

    def logits(params: PyTree, hidden: Array) -> Array:
        return apply(params, hidden, method="logits")

    def init_cache(batch: int, capacity: int) -> _cache.Cache:
        return _cache.init_cache(config, batch, capacity)

    def extend(
        params: PyTree, cache: _cache.Cache, tokens: Array, start: Array, count: Array, inputs: PyTree | None = None
    ) -> tuple[Output, _cache.Cache]:
        _refuse(inputs)
        hidden, value, cache = apply(params, cache, tokens, start, count, method="extend")
        return Output(hidden, value), cache

    return Policy(init, forward, logits, init_cache, extend, config.value_head)


def _refuse(inputs: PyTree | None) -> None:
    if inputs is not None:
        raise ValueError("inputs were given, but this transformer reads tokens alone: pass inputs=None")
