import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.sampling import entropy, log_probs, sample

draw = jax.jit(sample)
score = jax.jit(log_probs)
LOG0 = -np.inf


def grid(n):
    """Uniform numbers whose empirical distribution is as even as possible."""
    return jnp.asarray((np.arange(n) + 0.5) / n, jnp.float32)


def frequencies(logits, n=4000, temperature=1.0, **filters):
    logits = jnp.asarray(logits)
    rows = jnp.broadcast_to(logits, (n, logits.shape[-1]))
    out = draw(grid(n), rows, temperature, **filters)
    return np.bincount(out.token, minlength=logits.shape[-1]) / n, out


# P30: temperature divides logits.
def test_temperature_golden():
    np.testing.assert_allclose(score(jnp.array([2.0, 1, 0]), 0.5), [-0.14293163, -2.14293163, -4.14293163], atol=1e-6)
    np.testing.assert_allclose(score(jnp.array([2.0, 1, 0]), 1.0), [-0.40760596, -1.40760596, -2.40760596], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_scoring_again_gives_the_sampled_log_probability(temperature):
    logits = jax.random.normal(jax.random.key(0), (64, 264)) * 3
    allowed = np.arange(264) < 257
    out = draw(jax.random.uniform(jax.random.key(1), 64), logits, temperature, allowed=allowed)
    again = np.take_along_axis(np.asarray(score(logits, temperature, allowed)), np.asarray(out.token)[:, None], 1)[:, 0]
    np.testing.assert_array_equal(out.logp, again)


# P49: float32 before the softmax, whatever the dtype of the logits.
def test_precision_golden():
    got = score(jnp.array([10, 9.5, 9, 0.1], jnp.bfloat16))
    np.testing.assert_allclose(got, [-0.68029505, -1.18029499, -1.68029505, -10.58019733], atol=2e-6)
    got = score(jnp.array([1000.0, 999, -1000]))
    np.testing.assert_allclose(got, [-0.31326163, -1.31326163, -2000.31326], rtol=1e-6)


# P50: -inf logits, in entropy, its gradient and the score's.
def test_impossible_tokens_golden():
    logits = jnp.array([0.0, 0, LOG0])
    value, grad = jax.value_and_grad(lambda x: entropy(log_probs(x)))(logits)
    np.testing.assert_allclose(value, 0.69314718, atol=1e-7)
    np.testing.assert_array_equal(grad, [0, 0, 0])
    np.testing.assert_allclose(entropy(jnp.log(jnp.array([0.5, 0.5, 0.0]))), 0.69314718, atol=1e-7)
    grad = jax.grad(lambda x: log_probs(x, 1.0, jnp.array([True, False, True]))[0])(jnp.array([1.0, 2, LOG0]))
    np.testing.assert_allclose(grad, [0, 0, 0], atol=1e-7)


def test_row_without_any_possible_token():
    logits = jnp.full(4, LOG0)
    value, grad = jax.value_and_grad(lambda x: entropy(log_probs(x)))(logits)
    assert value == 0 and not np.any(grad)
    out = draw(jnp.float32(0.5), logits, 1.0, allowed=jnp.array([False, False, True, True]))
    assert out.token == 2 and np.isnan(out.logp)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_non_finite_logits_are_seen(bad, filters):
    logits = jnp.array([[bad, 0.0, bad, 1.0], [0.0, 1.0, 2.0, 3.0]])
    allowed = jnp.array([False, True, True, True])
    for temperature in (0.0, 1.0):
        out = draw(jnp.array([0.9, 0.9]), logits, temperature, allowed=allowed, **filters)
        assert out.token[0] == 2 and np.isnan(out.logp[0]) and np.isfinite(out.logp[1])


# P34: the noise must not follow the dtype of the logits.
def test_bfloat16_is_not_biased():
    keys = jax.random.split(jax.random.key(3), 2)
    logits = jnp.broadcast_to(jnp.zeros(50_000, jnp.bfloat16), (2000, 50_000))
    token = np.asarray(draw(jax.random.uniform(keys[0], 2000), logits).token)
    assert abs(np.mean(token < 1000) - 0.02) < 0.0125 and abs(token.mean() - 24999.5) < 1300
    logits = jnp.broadcast_to(jnp.zeros(16, jnp.bfloat16), (200_000, 16))
    token = np.asarray(draw(jax.random.uniform(keys[1], 200_000), logits).token)
    np.testing.assert_allclose(np.bincount(token) / 200_000, 0.0625, atol=0.002)


# P31: the token that crosses the threshold is kept.
@pytest.mark.parametrize(
    ("probs", "top_p", "expected"),
    [
        ([0.5, 0.35, 0.10, 0.05], 0.9, [0.526316, 0.368421, 0.105263, 0]),
        ([0.4, 0.3, 0.2, 0.1], 0.8, [0.444444, 0.333333, 0.222222, 0]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0.625, 0.375, 0, 0]),
        ([0.95, 0.03, 0.02], 0.9, [1, 0, 0]),
        ([0.05, 0.3, 0.15, 0.5], 0.6, [0, 0.375, 0, 0.625]),
        ([0.4, 0.3, 0.2, 0.1], 1.0, [0.4, 0.3, 0.2, 0.1]),
        ([0.25, 0.25, 0.25, 0.25], 0.3, [0.5, 0.5, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], 0.0, [1, 0, 0, 0]),
    ],
)
def test_top_p_golden(probs, top_p, expected):
    got, out = frequencies(np.log(probs), top_p=top_p)
    np.testing.assert_allclose(got, expected, atol=1e-3)
    np.testing.assert_allclose(out.logp, np.log(np.asarray(expected)[out.token]), atol=2e-5)


def test_top_k_keeps_exactly_k_and_breaks_ties_by_index():
    got, _ = frequencies([0.0, 1, 1, 1], top_k=2)
    np.testing.assert_allclose(got, [0, 0.5, 0.5, 0], atol=1e-3)
    got, _ = frequencies([-0.0, 0.0, -0.0, 0.0, -1], top_k=3)
    np.testing.assert_allclose(got, [1 / 3, 1 / 3, 1 / 3, 0, 0], atol=1e-3)
    got, _ = frequencies(np.log([0.4, 0.3, 0.2, 0.1]), top_k=3, top_p=0.75)  # of 4/9, 3/9, 2/9 two reach 0.75
    np.testing.assert_allclose(got, [4 / 7, 3 / 7, 0, 0], atol=1e-3)
    got, _ = frequencies(np.log([0.4, 0.3, 0.2, 0.1]), top_k=9)
    np.testing.assert_allclose(got, [0.4, 0.3, 0.2, 0.1], atol=1e-3)


@functools.cache
def filter_rows():
    return jax.jit(jax.vmap(lambda u, x, k, p: sample(u, x, 1.0, top_k=k, top_p=p), (0, None, None, None)))


def kept_by_sorting(logits, top_k, top_p):
    """The rule by a sort, in float64."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    p = np.exp(logits[order] - logits.max())
    p = p / p.sum()
    kept = order[(np.cumsum(p) - p < top_p) | (np.arange(len(order)) == 0)]
    return set(kept.tolist())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-6, 6), min_size=20, max_size=20), st.integers(1, 20), st.floats(0.03, 0.97))
def test_filters_match_a_sort(logits, top_k, top_p):
    logits = np.asarray(logits, np.float64) / 2
    out = filter_rows()(grid(2000), jnp.asarray(logits, jnp.float32), top_k, top_p)
    expected = kept_by_sorting(logits, top_k, top_p - 1e-5), kept_by_sorting(logits, top_k, top_p + 1e-5)
    drawn = set(np.asarray(out.token).tolist())
    assert drawn <= expected[1]
    p = np.exp(logits - logits.max())
    for kept in expected[:1]:
        share = p / sum(p[i] for i in expected[1])
        assert {i for i in kept if share[i] > 1e-3} <= drawn
    if expected[0] == expected[1]:
        np.testing.assert_allclose(out.logp, np.log(share[np.asarray(out.token)]), atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1.0, 10.0, 1e6]))
def test_greedy_is_argmax_and_top_1(seed, spread):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(16, 37)) * 3).round().astype(np.float32) * spread  # with ties
    uniform = rng.random(16).astype(np.float32)
    best = np.argmax(logits, -1)
    greedy, top = draw(uniform, logits, jnp.zeros(16)), draw(uniform, logits, 1.0, top_k=1)
    np.testing.assert_array_equal(greedy.token, best)
    np.testing.assert_array_equal(top.token, best)
    np.testing.assert_allclose(greedy.logp, np.asarray(score(logits))[np.arange(16), best], atol=1e-6)
    np.testing.assert_allclose(top.logp, 0.0, atol=1e-5)


def test_greedy_and_sampled_rows_mix():
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 0.5]), (2, 3))
    out = draw(jnp.array([0.01, 0.01]), logits, jnp.array([0.0, 2.0]))
    assert out.token.tolist() == [1, 0]
    np.testing.assert_allclose(out.logp, [score(logits[0])[1], score(logits[0], 2.0)[0]], atol=1e-6)


@pytest.mark.parametrize("size", [2, 31, 33, 264, 5000])
def test_index_order_inverse(size):
    p = np.random.default_rng(size).dirichlet(np.full(size, 0.3))
    u = np.random.default_rng(0).random(512).astype(np.float32)
    token = draw(u, jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (512, size))).token
    edges = np.concatenate([[0], np.cumsum(p)])
    token = np.asarray(token)
    assert np.all(u >= edges[token] - 1e-6) and np.all(u <= edges[token + 1] + 1e-6)


@pytest.mark.parametrize("size", [3, 33, 264, 5000])
def test_extreme_uniforms_never_draw_an_impossible_token(size):
    rng = np.random.default_rng(size)
    allowed = rng.random(size) < 0.3
    allowed[size // 2] = True
    logits = jnp.asarray(rng.normal(size=(256, size)) * 8, jnp.float32)
    for u in (0.0, 1e-30, 0.5, 1 - 2**-24, 1 - 2**-23):
        token = draw(jnp.full(256, u, jnp.float32), logits, 1.0, allowed=allowed).token
        assert np.all(allowed[token]), f"at {u}"
    ends = np.flatnonzero(allowed)[[0, -1]]
    flat = jnp.zeros((1, size))
    assert draw(jnp.zeros(1), flat, 1.0, allowed=allowed).token == ends[0]
    assert draw(jnp.full(1, 1 - 2**-24, jnp.float32), flat, 1.0, allowed=allowed).token == ends[1]


def test_frequencies_follow_the_distribution():
    logits = np.random.default_rng(5).normal(size=40) * 1.5
    temperature, n = 0.8, 100_000
    u = jax.random.uniform(jax.random.key(7), n)
    token = draw(u, jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, 40)), temperature).token
    p = np.exp(logits / temperature)
    assert scipy.stats.chisquare(np.bincount(token, minlength=40), n * p / p.sum()).pvalue > 1e-3


@functools.cache
def slope():
    return jax.jit(jax.grad(lambda x, t, allowed: jnp.sum(entropy(log_probs(x, t, allowed))), (0, 1)))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31 - 1))
def test_log_probs_are_a_distribution_with_finite_gradients(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 64)).astype(np.float32) * 30
    allowed = (rng.random(64) < 0.5) | (np.arange(64) == 0)
    logp = score(logits, 0.7, allowed)
    assert np.all(logp <= 0)
    np.testing.assert_allclose(np.exp(logp).sum(-1), 1, atol=1e-5)
    assert not np.any(np.exp(logp)[:, ~allowed])
    assert all(np.all(np.isfinite(g)) for g in slope()(logits, jnp.full(4, 0.7), allowed))
