"""Metrics as sums and counts: they add over micro-batches and devices, and are divided once, at the end.

``{name: (total, count)}``. Two metrics combine by adding both; a name that begins with ``max_`` combines by the
maximum of the totals instead.
"""

from __future__ import annotations

import jax.numpy as jnp

from agentrl_jax.types import Array, Metrics


def masked(x: Array, mask: Array) -> tuple[Array, Array]:
    """``(sum of x where mask, number of true)``; whatever stands in masked slots is not read."""
    return jnp.sum(jnp.where(mask, x, 0.0).astype(jnp.float32)), jnp.sum(mask.astype(jnp.float32))


def scalar(x: Array) -> tuple[Array, Array]:
    """A single value as a metric: ``(x, 1)``."""
    return jnp.asarray(x, jnp.float32), jnp.ones((), jnp.float32)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Combines two sets of metrics; a name in one of them alone is kept."""
    out = {**a, **b}
    for name in a.keys() & b.keys():
        total = jnp.maximum(a[name][0], b[name][0]) if name.startswith("max_") else a[name][0] + b[name][0]
        out[name] = (total, a[name][1] + b[name][1])
    return out


def reduce(stacked: Metrics) -> Metrics:
    """Combines metrics stacked along a leading axis, as a scan returns them."""
    return {
        k: (jnp.max(t, axis=0) if k.startswith("max_") else jnp.sum(t, axis=0), jnp.sum(n, axis=0))
        for k, (t, n) in stacked.items()
    }


def finalize(metrics: Metrics) -> dict[str, Array]:
    """``total / count``, NaN where nothing was counted; the total itself for ``max_`` names."""
    return {
        k: t if k.startswith("max_") else jnp.where(n > 0, t / jnp.maximum(n, 1e-9), jnp.nan)
        for k, (t, n) in metrics.items()
    }
