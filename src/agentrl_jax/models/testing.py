"""Conformance of a policy, for every model of the package and for users' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.policy import Output, Policy
from agentrl_jax.types import Array, PyTree

_B, _T, _CHUNK = 3, 12, 5


class _Suite(NamedTuple):
    policy: Policy
    params: PyTree
    vocab_size: int
    tolerance: float
    tokens: np.ndarray
    forward: Callable[..., tuple[Array, Array]]
    extend: Callable[..., tuple[tuple[Array, Array], PyTree]]


def check_policy(policy: Policy, vocab_size: int, key: Array | None = None, *, tolerance: float = 1e-4) -> None:
    """Checks the contract of ``Policy`` on small random inputs.

    ``forward`` against ``extend`` (token by token, in ragged chunks, over stale slots, up to the capacity and beyond),
    causality, independence of rows, tokens that do not exist, shapes and dtypes, ``vmap`` over parameters.

    Args:
      policy: what to check.
      vocab_size: token ids are drawn from ``[0, vocab_size)``.
      key: of the parameters; None: a fixed one.
      tolerance: on logits and values where two computations of the same thing are compared.

    Raises:
      AssertionError: what is violated.
    """
    params = jax.jit(policy.init)(jax.random.key(0) if key is None else key)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (_B, _T)).astype(np.int32)

    def read(params: PyTree, out: Output) -> tuple[Array, Array]:
        return policy.logits(params, out.hidden), out.value

    def extend(params: PyTree, cache: PyTree, tokens: Array, start: Array, count: Array):
        out, cache = policy.extend(params, cache, tokens, start, count)
        return read(params, out), cache

    forward = jax.jit(lambda params, tokens: read(params, policy.forward(params, tokens)))
    suite = _Suite(policy, params, vocab_size, tolerance, tokens, forward, jax.jit(extend))
    for check in (_shapes, _causality, _rows, _steps, _ragged, _absent, _overflow, _stale, _members):
        check(suite)


def _close(s: _Suite, got: Sequence[Array], expected: Sequence[Array], what: str) -> None:
    for name, a, b in zip(("logits", "value"), got, expected, strict=True):
        gap = float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0))
        assert gap <= s.tolerance, f"{what}: {name} differ by {gap:.2e}, more than {s.tolerance}"


def _same(a: PyTree, b: PyTree) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _call(s: _Suite, cache: PyTree, tokens: np.ndarray, start: list[int] | np.ndarray, count: list[int] | np.ndarray):
    return s.extend(s.params, cache, jnp.asarray(tokens), jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32))


def _shapes(s: _Suite) -> None:
    hash(s.policy)
    logits, value = s.forward(s.params, s.tokens)
    assert logits.shape == (_B, _T, s.vocab_size), f"logits are {logits.shape}, not {(_B, _T, s.vocab_size)}"
    assert logits.dtype == jnp.float32, f"logits are {logits.dtype}, not float32"
    assert value.shape == (_B, _T), f"value is {value.shape}, not {(_B, _T)}"
    assert value.dtype == jnp.float32, f"value is {value.dtype}, not float32"
    assert s.policy.has_value or not np.any(value), "value must be 0 where has_value is False"
    cache = s.policy.init_cache(_B, _T)
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        name = jax.tree_util.keystr(path)
        assert leaf.ndim and leaf.shape[0] == _B, f"cache leaf {name} is {leaf.shape}: the batch must lead"
    _, after = _call(s, cache, s.tokens[:, :1], [0] * _B, [1] * _B)
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), c) for c in (cache, after))
    assert before == after, "extend changes the structure, shapes or dtypes of the cache: no loop could carry it"


def _causality(s: _Suite) -> None:
    changed = s.tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % s.vocab_size
    a, b = s.forward(s.params, s.tokens), s.forward(s.params, changed)
    _close(s, [x[:, :7] for x in a], [x[:, :7] for x in b], "changing a token changes what comes before it")
    assert not np.array_equal(a[0][:, 7:], b[0][:, 7:]), "changing a token changes nothing after it"


def _rows(s: _Suite) -> None:
    changed = s.tokens.copy()
    changed[1:] = (changed[1:] + 1) % s.vocab_size
    a, b = s.forward(s.params, s.tokens), s.forward(s.params, changed)
    _close(s, [x[0] for x in a], [x[0] for x in b], "forward: a row depends on the other rows")


def _feed(s: _Suite, cache: PyTree, schedule: list[list[int]], chunk: int, what: str) -> PyTree:
    """Feeds ``tokens`` in chunks of the given counts per row and compares every output with ``forward``."""
    expected = jax.device_get(s.forward(s.params, s.tokens))
    rows, fed = np.arange(_B), np.zeros(_B, int)
    for count in schedule:
        given = np.full((_B, chunk), -1, np.int32)
        for r, n in enumerate(count):
            given[r, :n] = s.tokens[r, fed[r] : fed[r] + n]
        out, cache = _call(s, cache, given, fed, count)
        assert all(np.all(np.isfinite(x)) for x in out), f"{what}: an output is not finite"
        for r in rows:
            got, want = [x[r, : count[r]] for x in out], [x[r, fed[r] : fed[r] + count[r]] for x in expected]
            _close(s, got, want, f"{what}: row {r} at {fed[r]} with count {count[r]}")
        fed = fed + np.array(count)
    assert np.all(fed == _T), "the schedule must feed every token"
    return cache


_RAGGED = [[5, 3, 0], [1, 0, 5], [0, 5, 2], [5, 4, 1], [1, 0, 4]]


def _steps(s: _Suite) -> None:
    _feed(s, s.policy.init_cache(_B, _T), [[1] * _B] * _T, 1, "extend by single tokens disagrees with forward")
    single = [[int(r < n) for r in range(_B)] for n in (3, 0, 1, 2)] + [[0, 0, 1]]
    left = [_T - sum(count[r] for count in single) for r in range(_B)]
    single += [[int(i < n) for n in left] for i in range(max(left))]
    _feed(s, s.policy.init_cache(_B, _T), single, 1, "extend by single tokens at ragged starts disagrees with forward")


def _ragged(s: _Suite) -> None:
    what = "extend by ragged chunks disagrees with forward"
    _feed(s, s.policy.init_cache(_B, _T), _RAGGED, _CHUNK, what)


def _absent(s: _Suite) -> None:
    """Tokens beyond ``count`` do not exist, whatever number stands there."""
    _, cache = _call(s, s.policy.init_cache(_B, _T), s.tokens[:, :_CHUNK], [0] * _B, [5, 3, 4])
    given = s.tokens[:, 5:10].copy()
    out, untouched = _call(s, cache, given, [5, 3, 4], [0] * _B)
    assert _same(cache, untouched), "count 0 changes the cache"
    assert all(np.all(np.isfinite(x)) for x in out), "count 0: an output is not finite"
    out_a, cache_a = _call(s, cache, given, [5, 3, 4], [2, 0, 4])
    given[0, 2:], given[1], given[2, 4:] = 10**6, -1, -(2**31)
    out_b, cache_b = _call(s, cache, given, [5, 3, 4], [2, 0, 4])
    assert _same(cache_a, cache_b), "a token beyond count changes the cache"
    for r, n in ((0, 2), (2, 4)):
        _close(s, [x[r, :n] for x in out_a], [x[r, :n] for x in out_b], "a token beyond count changes an output")
    assert all(np.all(np.isfinite(x)) for x in out_b), "an output beyond count is not finite"


def _overflow(s: _Suite) -> None:
    """Positions at or beyond the capacity are dropped, never clamped."""
    expected = jax.device_get(s.forward(s.params, s.tokens))
    cache = s.policy.init_cache(_B, _T)
    for start in (0, _CHUNK):
        _, cache = _call(s, cache, s.tokens[:, start : start + _CHUNK], [start] * _B, [_CHUNK] * _B)
    given = np.zeros((_B, _CHUNK), np.int32)
    given[:, :2] = s.tokens[:, 10:]
    out, beyond = _call(s, cache, given, [10] * _B, [_CHUNK] * _B)
    _close(s, [x[:, :2] for x in out], [x[:, 10:] for x in expected], "a chunk that runs beyond the capacity")
    assert all(np.all(np.isfinite(x)) for x in out), "an output beyond the capacity is not finite"
    _, within = _call(s, cache, given, [10] * _B, [2] * _B)
    assert _same(beyond, within), "positions beyond the capacity change the cache"
    _, after = _call(s, beyond, given, [_T, _T + 1, _T], [_CHUNK] * _B)
    assert _same(beyond, after), "a chunk that starts at the capacity changes the cache"


def _stale(s: _Suite) -> None:
    """A slot that starts again at position 0 sees nothing of what it held before."""
    cache = s.policy.init_cache(_B, _T)
    other = (s.tokens + 1) % s.vocab_size
    for start in range(0, _T, _CHUNK):
        given = np.resize(other[:, start:], (_B, _CHUNK))
        _, cache = _call(s, cache, given, [start] * _B, [min(_CHUNK, _T - start)] * _B)
    cache = _feed(s, cache, _RAGGED, _CHUNK, "a reused slot sees the episode before")
    _feed(s, cache, [[1] * _B] * _T, 1, "a reused slot sees the episode before")


def _members(s: _Suite) -> None:
    """``vmap`` over parameters equals one member after the other."""
    other = jax.jit(s.policy.init)(jax.random.key(1))
    both = jax.tree.map(lambda *x: jnp.stack(x), s.params, other)
    got = jax.vmap(s.forward, (0, None))(both, s.tokens)
    start, count = jnp.zeros(_B, jnp.int32), jnp.array([1, 0, 1], jnp.int32)
    cache, tokens = s.policy.init_cache(_B, _T), jnp.asarray(s.tokens[:, :1])
    step, _ = jax.vmap(s.extend, (0, None, None, None, None))(both, cache, tokens, start, count)
    for i, params in enumerate((s.params, other)):
        _close(s, [x[i] for x in got], s.forward(params, s.tokens), "vmap over parameters changes forward")
        one, _ = s.extend(params, cache, tokens, start, count)
        _close(s, [x[i, ::2] for x in step], [x[::2] for x in one], "vmap over parameters changes extend")
