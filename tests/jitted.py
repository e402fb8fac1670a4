"""Calls a function under a cached ``jit``: names, switches and whole numbers are static, everything else is traced."""

import functools

import jax
import numpy as np

STATIC = (str, bool, int, type(None))


@functools.cache
def _compiled(fn, args, options):
    def run(traced_args, traced_options):
        traced = iter(traced_args)
        full = [next(traced) if a is _TRACED else a for a in args]
        return fn(*full, **dict(options), **traced_options)

    return jax.jit(run)


class _Traced:
    pass


_TRACED = _Traced()


def call(fn, *args, **options):
    """``fn(*args, **options)`` as NumPy arrays; one compilation a signature."""
    kept = tuple(a if isinstance(a, STATIC) else _TRACED for a in args)
    static = tuple(sorted((k, v) for k, v in options.items() if isinstance(v, STATIC)))
    traced = {k: _array(v) for k, v in options.items() if not isinstance(v, STATIC)}
    out = _compiled(fn, kept, static)([_array(a) for a in args if not isinstance(a, STATIC)], traced)
    return jax.tree.map(np.asarray, out)


def _array(x):
    if isinstance(x, jax.Array) or hasattr(x, "_fields"):
        return x
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float64 else x
