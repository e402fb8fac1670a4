"""A policy as pure functions: any model that predicts the next token and keeps an explicit cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agentrl_jax.types import Array, PyTree


class Output(NamedTuple):
    """``hidden [B, T, D]``, the state from which ``Policy.logits`` reads the next token; ``value [B, T]`` (0 without
    a head)."""

    hidden: Array
    value: Array


class Policy(NamedTuple):
    """A model as functions; hashable and static. Every leaf of a cache is batch-leading.

    Attributes:
      init: ``(key) -> params``.
      forward: ``(params, tokens[B, T], inputs=None) -> Output``, the training pass: causal, position = index.
      logits: ``(params, hidden[..., D]) -> float32[..., V]``.
      init_cache: ``(batch, capacity) -> cache``.
      extend: ``(params, cache, tokens[B, C], start[B], count[B], inputs=None) -> (Output, cache)``. Token ``c`` of
        row ``b`` has position ``start[b] + c``; only the first ``count[b]`` tokens exist: nothing is written for the
        others, and their outputs are arbitrary but finite. Positions at or beyond the capacity are dropped, never
        clamped.
      has_value: whether ``Output.value`` comes from a trained head.
    """

    init: Callable[[Array], PyTree]
    forward: Callable[..., Output]
    logits: Callable[[PyTree, Array], Array]
    init_cache: Callable[[int, int], PyTree]
    extend: Callable[..., tuple[Output, Any]]
    has_value: bool = False
