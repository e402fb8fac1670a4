import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jitted import call

from agentrl_jax.kl import kl
from agentrl_jax.masked import masked_mean

golden = oracles.golden
LOGP = np.array([[-0.7, -0.6, -1.5, -0.7], [-0.6, -1.0, -1.3, -0.2]])
REF = np.array([[-1.1, -0.4, -1.9, -0.9], [-0.4, -1.1, -1.0, -1.4]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)


def expected(theta, ref, behaviour, **options):
    """The exact expectation over three actions of the estimator, and its gradient in theta."""

    def value(x):
        term = kl(jax.nn.log_softmax(x), jax.nn.log_softmax(ref), **options)
        return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(behaviour)) * term)

    return call(jax.value_and_grad(value), theta)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values_and_means_worked_examples(estimator):
    got = call(kl, LOGP, REF, estimator=estimator, mask=MASK)
    np.testing.assert_allclose(got, golden(f"B16.{estimator}"), atol=1e-5)
    mean = golden("B16.means")[int(estimator[1]) - 1]
    assert float(call(masked_mean, got, MASK)) == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_exact_expectations_and_gradients(estimator):
    theta, ref = jnp.array([0.5, 0, -0.5]), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    value, grad = expected(theta, ref, theta, estimator=estimator)
    assert float(value) == pytest.approx(golden("B16.E")[int(estimator[1]) - 1], abs=1e-5)
    np.testing.assert_allclose(grad, golden(f"B16.loss.{estimator}"), atol=1e-5)
    logp = jax.nn.log_softmax(theta)
    term = kl(logp, ref, estimator=estimator)

    def as_reward(x):
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp) * term) * jax.nn.log_softmax(x))

    np.testing.assert_allclose(call(jax.grad(as_reward), theta), golden(f"B16.rew.{estimator}"), atol=1e-5)
    spread = jnp.sum(jnp.exp(logp) * term**2) - value**2
    assert float(spread) == pytest.approx(golden("B16.Var")[int(estimator[1]) - 1], abs=1e-5)


def test_weighted_k3_has_the_gradient_of_the_divergence():
    theta, ref = jnp.array([0.5, 0, -0.5]), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    _, grad = expected(theta, ref, theta, estimator="k3", logp_old=jax.nn.log_softmax(theta))
    np.testing.assert_allclose(grad, golden("B16.rhok3"), atol=1e-5)
    np.testing.assert_allclose(grad, golden("B16.gKLrev"), atol=1e-5)


def test_p15_weight_is_live_for_k3_and_detached_for_k2():
    theta, ref, old = jnp.array([0.3, 0.6, -0.4]), jnp.array([0.1, -0.2, 0.5]), jnp.array([0.2, 0.4, -0.1])
    true = [-0.03254301, 0.24060734, -0.20806432]
    run = functools.partial(expected, theta, ref, old)
    value, grad = run(estimator="k3", logp_old=jax.nn.log_softmax(old))
    assert float(value) == pytest.approx(0.21986138, abs=1e-6)
    np.testing.assert_allclose(grad, true, atol=1e-6)
    for estimator in ("k1", "k2", "k1+", "k3+"):
        _, grad = run(estimator=estimator, logp_old=jax.nn.log_softmax(old))
        np.testing.assert_allclose(grad, true, atol=1e-6, err_msg=estimator)
    plain, grad = run(estimator="k3")
    assert float(plain) == pytest.approx(0.25758750, abs=1e-6)
    np.testing.assert_allclose(grad, [0.09585950, 0.28802752, -0.38388702], atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_forms_have_one_value_and_the_other_gradient(estimator):
    logp, ref = jnp.asarray(LOGP), jnp.asarray(REF)
    value = call(kl, logp, ref, estimator=estimator)
    np.testing.assert_allclose(value, call(kl, logp, ref, estimator=estimator[:2]), atol=1e-6)
    grad = call(jax.grad(lambda x: kl(x, ref, estimator=estimator).sum()), logp)
    np.testing.assert_allclose(grad, logp - ref, atol=1e-6)


def test_p26_retrieved_text_stays_out_of_the_divergence():
    logp, ref = np.array([-1, -2, -9, -8, -0.5]), np.array([-1.1, -2.1, -1, -1, -0.6])
    mask = np.array([1, 1, 0, 0, 1], bool)
    for estimator, want in (("k1", 0.1), ("k3", 0.00483742)):
        term = call(kl, logp, ref, estimator=estimator, mask=mask)
        assert float(call(masked_mean, term, mask)) == pytest.approx(want, abs=1e-6)
        assert not term[~mask].any()


def test_perception_worked_example():
    """PAPO's divergence has d = logp_masked - logp: the reference is the policy on the masked observation."""
    logp, hidden = np.array([-0.5, -1, -0.2]), np.array([-1, -1.2, -0.2])
    got = call(kl, logp, hidden, estimator="k3")
    np.testing.assert_allclose(got, golden("A31.k3"), atol=1e-6)
    assert -0.01 * got.mean() == pytest.approx(float(golden("A31.term")), abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
@pytest.mark.parametrize("size", [200.0, -200.0])
def test_p20_finite_at_extreme_ratios(estimator, size):
    fn = jax.value_and_grad(lambda x: kl(x, jnp.float32(0), estimator=estimator, logp_old=jnp.float32(0)))
    value, grad = call(fn, np.float32(size))
    assert np.isfinite(value) and np.isfinite(grad)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_garbage_and_the_reference_carry_no_gradient(estimator):
    dirty = jnp.where(jnp.asarray(MASK), jnp.asarray(REF), jnp.nan)
    fn = jax.grad(lambda x, r: kl(x, r, estimator=estimator, mask=MASK, logp_old=r).sum(), argnums=(0, 1))
    grad, grad_ref = call(fn, jnp.asarray(LOGP), dirty)
    assert np.isfinite(grad).all() and not np.asarray(grad)[~MASK].any()
    np.testing.assert_array_equal(grad_ref, np.zeros_like(MASK, float))


def test_equal_policies_have_no_divergence():
    for estimator in ("k1", "k2", "k3"):
        fn = jax.value_and_grad(functools.partial(kl, estimator=estimator))
        value, grad = call(fn, np.float32(-1.0), np.float32(-1.0))
        assert float(value) == 0.0
        assert float(grad) == (1.0 if estimator == "k1" else 0.0)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"Unknown estimator 'k4'. Known"):
        kl(jnp.zeros(1), jnp.zeros(1), estimator="k4")
