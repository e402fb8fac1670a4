import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jitted import call

from agentrl_jax.entropy import clip_cov_keep, covariance, entropy, full_kl, kl_cov_select, top_entropy_mask

golden = oracles.golden
graded = jax.value_and_grad(lambda x: entropy(x).sum())


def test_worked_examples():
    value, grad = call(graded, np.array([0.5, 0, -0.5]))
    assert float(value) == pytest.approx(float(golden("B12.H")), abs=1e-6)
    np.testing.assert_allclose(grad, golden("B12.gradH"), atol=1e-6)
    np.testing.assert_allclose(call(entropy, np.array([[2.0, 0, -1], [0, 0, 0]])), golden("B12.Htok"), atol=1e-6)


def test_p50_filtered_logits_take_no_part():
    value, grad = call(graded, np.array([0, 0, -np.inf]))
    assert float(value) == pytest.approx(np.log(2))
    np.testing.assert_allclose(grad, np.zeros(3), atol=1e-7)
    value, grad = call(graded, np.full(3, -np.inf))
    assert float(value) == 0.0
    np.testing.assert_array_equal(grad, np.zeros(3))
    divergence = jax.value_and_grad(lambda x: full_kl(x, jnp.array([1.0, 0, -jnp.inf])).sum())
    value, grad = call(divergence, np.array([0, 1, -np.inf]))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_p49_float32_whatever_the_logits_type():
    low = jnp.asarray([10, 9.5, 9, 0.1], jnp.bfloat16)
    assert float(call(entropy, low)) == pytest.approx(float(call(entropy, np.asarray(low, np.float32))), abs=1e-7)
    value, grad = call(graded, np.array([1000.0, 999, -1000]))
    p = 1 / (1 + np.exp(-1.0))
    assert float(value) == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)), rel=1e-5)
    assert np.isfinite(grad).all()


def test_full_divergence_equals_the_sum():
    logits, ref = np.array([0.5, 0, -0.5]), np.log([0.2, 0.5, 0.3])
    assert float(call(full_kl, logits, ref)) == pytest.approx(float(golden("B16.KLrev")), abs=1e-6)
    grad = call(jax.grad(full_kl), logits, ref)
    np.testing.assert_allclose(grad, golden("B16.gKLrev"), atol=1e-5)


def test_top_entropy_keeps_the_share_of_counted_tokens():
    h = np.array([[5.0, 1, 2, np.nan], [4, 3, 0, 9]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(call(top_entropy_mask, h, mask, fraction=0.5), [[1, 0, 0, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(call(top_entropy_mask, h, mask, fraction=0.0), [[1, 0, 0, 0], [0, 0, 0, 0]])
    assert not call(top_entropy_mask, h, np.zeros_like(mask), fraction=0.5).any()


@pytest.mark.parametrize("seed", range(3))
def test_covariance_selections(seed):
    logp, old, _, adv, mask = oracles.ragged(seed)
    kept = [x[mask] for x in (logp, adv)]
    want = np.zeros_like(logp)
    want[mask] = (kept[0] - kept[0].mean()) * (kept[1] - kept[1].mean())
    np.testing.assert_allclose(call(covariance, logp, adv, mask), want, atol=1e-5)
    chosen = call(kl_cov_select, logp, adv, mask, fraction=0.3)
    count = max(1, int(0.3 * mask.sum()))
    assert chosen.sum() == count and not chosen[~mask].any()
    assert want[chosen].min() >= np.sort(want[mask])[-count] - 1e-6
    options = {"fraction": 0.25, "low": 0.05, "high": 5.0}
    keep = call(clip_cov_keep, logp, old, adv, mask, jax.random.key(seed), **options)
    ratio = np.exp(logp - old)
    clipped = ((adv > 0) & (ratio > 1.2)) | ((adv < 0) & (ratio < 0.8))
    eligible = mask & ~clipped & (want > 0.05) & (want < 5)
    dropped = mask & ~keep
    assert not (dropped & ~eligible).any()
    assert dropped.sum() == min(max(1, int(0.25 * mask.sum())), eligible.sum())
