"""The same numbers as a peer's library, where one is installed: ``pip install -e '.[test,parity]'``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import discounted_return, gae, losses, policy_gradient, ppo_clip, vtrace
from agentrl_jax.entropy import entropy

rlax = pytest.importorskip("rlax", reason="the parity extra is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")

T = 7
RNG = np.random.default_rng(0)
REWARD, VALUE, LOGP, OTHER, ADV = (jnp.asarray(RNG.normal(size=T), jnp.float32) for _ in range(5))
BOOTSTRAP = 0.7
MASK = jnp.ones(T, bool)
NEXT = jnp.append(VALUE[1:], BOOTSTRAP)


@pytest.mark.parametrize("discount, lambda_", [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_gae_is_rlaxs(discount, lambda_):
    adv, target = gae(REWARD, VALUE, MASK, discount=discount, lambda_=lambda_, bootstrap=BOOTSTRAP)
    theirs = rlax.truncated_generalized_advantage_estimation(
        REWARD, jnp.full(T, discount), lambda_, jnp.append(VALUE, BOOTSTRAP)
    )
    np.testing.assert_allclose(adv, theirs, atol=1e-5)
    np.testing.assert_allclose(target, theirs + VALUE, atol=1e-5)


def test_returns_are_lambda_returns_with_lambda_one():
    found = discounted_return(REWARD, MASK, discount=0.9, bootstrap=BOOTSTRAP)
    np.testing.assert_allclose(found, rlax.lambda_returns(REWARD, jnp.full(T, 0.9), NEXT, 1.0), atol=1e-5)


@pytest.mark.parametrize("lambda_, clip", [(1.0, 1.0), (0.8, 1.0), (0.8, 2.0)])
def test_vtrace_is_rlaxs(lambda_, clip):
    adv, target = vtrace(
        REWARD, VALUE, LOGP, OTHER, MASK, discount=0.9, lambda_=lambda_, rho_clip=clip, pg_rho_clip=clip,
        bootstrap=BOOTSTRAP,
    )  # fmt: skip
    theirs = rlax.vtrace_td_error_and_advantage(
        VALUE, NEXT, REWARD, jnp.full(T, 0.9), jnp.exp(LOGP - OTHER), lambda_, clip, clip
    )
    np.testing.assert_allclose(adv, theirs.pg_advantage, atol=1e-5)
    np.testing.assert_allclose(target - VALUE, theirs.errors, atol=1e-5)


def test_the_clipped_surrogate_is_rlaxs_in_value_and_gradient():
    ours = lambda x: jnp.mean(ppo_clip(x, OTHER, ADV))  # noqa: E731
    theirs = lambda x: rlax.clipped_surrogate_pg_loss(jnp.exp(x - OTHER), ADV, 0.2)  # noqa: E731
    for found, expected in zip(jax.value_and_grad(ours)(LOGP), jax.value_and_grad(theirs)(LOGP), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_policy_gradient_and_entropy_are_rlaxs():
    logits = jnp.asarray(RNG.normal(size=(T, 5)), jnp.float32)
    action = jnp.asarray(RNG.integers(0, 5, T))

    def ours(logits):
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        return jnp.mean(policy_gradient(logp, ADV)) - 0.1 * jnp.mean(entropy(logits))

    def theirs(logits):
        ones = jnp.ones(T)
        return rlax.policy_gradient_loss(logits, action, ADV, ones) + 0.1 * rlax.entropy_loss(logits, ones)

    for found, expected in zip(jax.value_and_grad(ours)(logits), jax.value_and_grad(theirs)(logits), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_value_losses_are_half_squares():
    np.testing.assert_allclose(losses.value_loss(VALUE, REWARD), rlax.l2_loss(VALUE - REWARD), rtol=1e-6)
