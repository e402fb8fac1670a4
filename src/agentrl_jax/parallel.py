"""The only file that knows devices: seeds over devices, data parallel, FSDP, tensor rules, several hosts."""

from __future__ import annotations

from collections.abc import Callable

import jax


def over_seeds(f: Callable, how: str = "map") -> Callable:
    """``f(key)`` over a leading axis of keys: ``map`` (in turn), ``vmap`` (at once) or ``pmap`` (one a device), compiled.

    Raises:
      ValueError: an unknown ``how``.
    """
    if how == "pmap":
        return jax.pmap(f)
    if how == "vmap":
        return jax.jit(jax.vmap(f))
    if how == "map":
        return jax.jit(lambda keys: jax.lax.map(f, keys))
    raise ValueError(f"how must be map, vmap or pmap, got {how!r}")
