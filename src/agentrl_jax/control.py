"""Predicates that stay scalar under ``vmap``, so that loops and branches stay loops and branches.

``vmap`` turns a ``while_loop``, ``cond`` or ``switch`` whose predicate became batched into selects over
everything it carries: a whole key-value cache at every token. Reductions through this module have a batching
rule whose result is not batched (true if it is true for any member of the batch), so the control flow is
shared by the batch. The price, which every caller pays: a body must be a no-op for rows that did not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from agentrl_jax.types import Array

T = TypeVar("T")


@custom_vmap
def any_(x: Array) -> Array:
    """Whether any element is true: ``bool[...] -> bool[]``, one answer for a whole ``vmap``."""
    return jnp.any(x)


@any_.def_vmap
def _any_vmap(axis_size, in_batched, x):
    del axis_size, in_batched
    return any_(x), False


@custom_vmap
def max_(x: Array) -> Array:
    """The largest element: ``int32[...] -> int32[]``, one answer for a whole ``vmap``."""
    return jnp.max(x)


@max_.def_vmap
def _max_vmap(axis_size, in_batched, x):
    del axis_size, in_batched
    return max_(x), False


def while_any(needs: Callable[[T], Array], body: Callable[[T], T], carry: T) -> T:
    """Runs ``body`` while any element of ``needs(carry)`` is true; ``body`` must leave other rows alone."""
    return jax.lax.while_loop(lambda c: any_(needs(c)), body, carry)


def width_index(widths: Sequence[int], needed: Array) -> Array:
    """Index of the smallest of the ascending static ``widths`` that holds ``max(needed)``; the last one otherwise."""
    return jnp.sum(max_(needed) > jnp.asarray(widths[:-1], jnp.int32)).astype(jnp.int32)
