"""Scores of written tokens: alignment, views, temperature, and the vocabulary in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch, masks, trajectory
from tiny import CODEC, POLICY, params

from agentrl_jax import scoring
from agentrl_jax.scoring import View

B, T, V = 5, 12, CODEC.vocab_size
LENGTHS = (12, 7, 0, 3, 9)
ALLOWED = np.asarray(CODEC.sampleable)


def with_value():
    key = jax.random.key(8)
    return params() | {"value": jax.random.normal(key, (16,)), "value_bias": jnp.float32(0.3)}


def rows():
    traj = trajectory(masks(LENGTHS, T))
    return batch(traj._replace(temperature=jnp.asarray([1.0, 0.5, 1.0, 0.0, 1.5])))


@functools.cache
def scored(chunk, view=None):
    return jax.jit(lambda p, b: scoring.score(POLICY, p, view or View(), b, allowed=ALLOWED, chunk=chunk))


def directly(p, tokens, temperature):
    """Log-probabilities, entropies and values row by row, as the definition says."""
    out = POLICY.forward(p, tokens)
    logits = (
        np.array(POLICY.logits(p, out.hidden), np.float64) / np.where(temperature > 0, temperature, 1)[:, None, None]
    )
    logits[..., ~ALLOWED] = -np.inf
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    prob = np.exp(logp)
    entropy = -np.sum(np.where(prob > 0, prob * np.where(prob > 0, logp, 0), 0), -1)
    chosen = np.take_along_axis(logp[:, :-1], np.asarray(tokens)[:, 1:, None], 2)[..., 0]
    first = lambda x: np.concatenate([np.zeros((len(x), 1)), x], 1)  # noqa: E731
    return first(chosen), first(entropy[:, :-1]), first(np.asarray(out.value))


def test_scores_are_those_of_the_definition():
    p, b = with_value(), rows()
    score = scored(None)(p, b)
    logp, entropy, value = directly(p, b.traj.tokens, np.asarray(b.traj.temperature))
    mask = np.asarray(b.mask)
    np.testing.assert_allclose(score.logp[mask], logp[mask], atol=1e-5)
    np.testing.assert_allclose(score.entropy, entropy, atol=1e-5)
    np.testing.assert_allclose(score.value, value[:, :-1], atol=1e-6)
    np.testing.assert_allclose(score.bootstrap, value[np.arange(B), LENGTHS], atol=1e-6)
    assert not score.logp[:, 0].any() and not score.value[:, 0].any() and score.bootstrap[2] == 0
    assert np.all(score.logp[~np.isfinite(logp)] < -1e29)  # what cannot be sampled is scored so


@pytest.mark.parametrize("chunk", [7, 11, 54, 1000])
def test_chunks_of_the_vocabulary_equal_the_whole(chunk):
    p, b = with_value(), rows()
    for a, c in zip(scored(None)(p, b), scored(chunk)(p, b), strict=True):
        np.testing.assert_allclose(a, c, atol=1e-5)


def slope(chunk):
    def loss(p, b):
        s = scoring.score(POLICY, p, View(), b, allowed=ALLOWED, chunk=chunk)
        return jnp.sum(jnp.where(b.mask, b.adv * s.logp + b.target * s.entropy + s.value, 0.0)) + jnp.sum(s.bootstrap)

    return jax.grad(loss)


def test_gradients_in_chunks_equal_the_whole():
    whole, pieces = (jax.jit(slope(chunk))(with_value(), rows()) for chunk in (None, 13))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, pieces)
    assert all(np.any(x) for name, x in whole.items())


def sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)


def test_in_chunks_no_array_spans_tokens_and_vocabulary():
    largest = {c: max(sizes(jax.make_jaxpr(slope(c))(with_value(), rows()).jaxpr)) for c in (None, 8)}
    assert largest[None] >= B * (T - 1) * V
    assert largest[8] < B * (T - 1) * V / 2


def test_a_view_scores_other_tokens_at_an_offset():
    """A hint before the row, of another length in each: the same tokens, seen with it."""
    hints, lead = (0, 3, 1, 2, 3), 3

    def hinted(b):
        offset = jnp.asarray(hints, jnp.int32)
        index = jnp.arange(T + lead) - offset[:, None]
        own = jnp.take_along_axis(b.traj.tokens, jnp.clip(index, 0, T - 1), 1)
        return jnp.where(index < 0, 65, own), offset

    p, b = with_value(), rows()
    score = scored(None, View(tokens=hinted))(p, b)
    tokens, _ = hinted(b)
    logp, entropy, value = directly(p, tokens, np.asarray(b.traj.temperature))
    for i, shift in enumerate(hints):
        real = np.asarray(b.mask[i])
        part = slice(shift, shift + T)
        np.testing.assert_allclose(score.logp[i][real], logp[i, part][real], atol=1e-5)
        np.testing.assert_allclose(score.entropy[i][real], entropy[i, part][real], atol=1e-5)
        np.testing.assert_allclose(score.value[i][real], value[i, part][real], atol=1e-6)
        np.testing.assert_allclose(score.bootstrap[i], value[i, shift + LENGTHS[i]], atol=1e-6)
    assert not np.allclose(score.logp[1], scored(None)(p, b).logp[1])


def test_leading_axes_are_only_shape():
    p = with_value()
    flat = batch(trajectory(masks((12, 7, 0, 3, 9, 5, 12, 4), T)))
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, 2, *x.shape[1:]), flat)
    one, many = (scored(None)(p, b) for b in (flat, pairs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-6), one, many)
    assert many.bootstrap.shape == (2, 2, 2) and many.value.shape == (2, 2, 2, T)


def test_a_batch_begins_with_the_sampled_tokens():
    mask = masks(LENGTHS, T)
    expert = mask & (np.arange(T) < 5)
    traj = trajectory(mask, expert=expert)
    np.testing.assert_array_equal(scoring.as_batch(traj).mask, mask & ~expert)
    np.testing.assert_array_equal(scoring.as_batch(traj, traj.mask).mask, mask)
