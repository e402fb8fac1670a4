"""Policy losses by ratio and clip: each against its formula, and the first on-policy step of them all."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conversations import conversations

from agentrl_jax import objectives
from agentrl_jax.surrogates import CLIPS, IMITATIONS, RATIOS, SURROGATES, surrogate
from agentrl_jax.types import Score

PAIRS = list(SURROGATES)


def scored(b, logp):
    return Score(logp, jnp.zeros_like(logp), jnp.zeros_like(logp), b.bootstrap)


def numbers(loss):
    return {k: jnp.float32(v) for k, v in loss.hyper.items()}


def moved(b, seed=0, by=0.3):
    return jnp.minimum(b.logp_old + by * jax.random.normal(jax.random.key(seed), b.mask.shape), -1e-3)


def ready(seed, **hyper):
    b = conversations(seed)
    return b._replace(extra=b.extra | {"held": b.mask & (jnp.arange(b.mask.shape[1]) % 3 == 0)})


def rowwise(b, logp, fn):
    """``fn(logp, old, adv)`` of a row's written tokens, spread over them."""
    out = np.zeros(b.mask.shape)
    for i, on in enumerate(np.asarray(b.mask)):
        out[i, on] = fn(*(np.asarray(x, np.float64)[i, on] for x in (logp, b.logp_old, b.adv)))
    return out


ppo, cispo, sapo = (np.vectorize(f, otypes=[float]) for f in (oracles.ppo, oracles.cispo, oracles.sapo))

ORACLES = {
    ("none", "none"): lambda p, o, a: -a * p,
    ("none", "exponential"): lambda p, o, a: -np.minimum(np.exp(a / 0.5), 20.0) * p,
    ("none", "probability"): lambda p, o, a: -a * np.exp(p) * p,
    ("token", "none"): lambda p, o, a: -a * np.exp(p - o),
    ("token", "ppo"): lambda p, o, a: ppo(p, o, a),
    ("token", "dual"): lambda p, o, a: ppo(p, o, a, dual=3.0),
    ("token", "two-sided"): lambda p, o, a: ppo(p, o, a, ratio_max=4.0),
    ("token", "cispo"): lambda p, o, a: cispo(p, o, a, 1.0, 0.28),
    ("token", "sapo"): lambda p, o, a: sapo(p, o, a),
    ("sequence", "ppo"): lambda p, o, a: ppo(np.mean(p - o), 0.0, a[0], 3e-4, 4e-4),
    ("sequence-token", "ppo"): lambda p, o, a: ppo(np.mean(p - o), 0.0, a[0], 3e-4, 4e-4),
    ("geometric", "ppo"): lambda p, o, a: -a[0] * np.exp(
        np.mean(np.sign(a[0]) * np.minimum(np.sign(a[0]) * (p - o), np.sign(a[0]) * np.clip(p - o, -0.4, 0.4)))
    ),
    ("product", "ppo"): lambda p, o, a: ppo(np.sum(p - o), 0.0, a[0]),
}  # fmt: skip


@pytest.mark.parametrize("ratio, clip", ORACLES)
def test_a_loss_is_its_formula(ratio, clip):
    b, loss = ready(0), surrogate(ratio, clip)
    logp = moved(b)
    found = loss.surrogate(scored(b, logp), b, numbers(loss))
    np.testing.assert_allclose(found, rowwise(b, logp, ORACLES[ratio, clip]), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("ratio, clip", PAIRS)
def test_the_first_step_is_the_policy_gradient(ratio, clip):
    """At the policy that sampled, under the aggregation of the loss: the gradient is ``-A w`` (AWR: of its weight;
    probability-weighted: of its weight; product of ratios: ``n`` times it)."""
    b, loss = ready(1), surrogate(ratio, clip)
    b = objectives.weigh_tokens("seq-mean-token-mean")(b, {}, 1)
    f = lambda logp: objectives.weighted(b, loss.surrogate(scored(b, logp), b, numbers(loss)))  # noqa: E731
    found = jax.jit(jax.grad(f))(b.logp_old)
    adv, mask = np.asarray(b.adv), np.asarray(b.mask)
    special = {
        ("none", "exponential"): np.minimum(np.exp(adv / 0.5), 20.0),
        ("none", "probability"): adv * np.exp(np.asarray(b.logp_old)),
        ("product", "ppo"): adv * mask.sum(1, keepdims=True),
    }
    expected = -special.get((ratio, clip), adv) * np.asarray(b.weight)
    np.testing.assert_allclose(found, np.where(mask, expected, 0), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("ratio, clip", PAIRS)
def test_masked_slots_may_hold_anything_and_extremes_stay_finite(ratio, clip):
    b, loss = ready(2), surrogate(ratio, clip)
    junk = lambda x: jnp.where(b.mask, x, jnp.nan)  # noqa: E731
    b = b._replace(adv=junk(b.adv), logp_old=junk(b.logp_old))
    logp = jnp.where(b.mask, moved(b, by=200.0), jnp.inf)
    f = lambda x: jnp.sum(jnp.where(b.mask, loss.surrogate(scored(b, x), b, numbers(loss)), 0.0))  # noqa: E731
    value, grad = jax.jit(jax.value_and_grad(f))(logp)
    assert (
        np.isfinite(value) and np.isfinite(np.asarray(grad)).all() and not np.asarray(grad)[~np.asarray(b.mask)].any()
    )


def test_what_corrects_for_a_moved_policy_says_so():
    assert {pair for pair, loss in SURROGATES.items() if loss.single} == {p for p in PAIRS if p[0] == "none"}
    assert {pair[0] for pair, loss in SURROGATES.items() if loss.sequence} == {
        "sequence", "sequence-token", "geometric", "product",
    }  # fmt: skip


def test_pairs_that_do_not_go_together_say_why():
    with pytest.raises(ValueError, match="ratio 'none' with clip 'ppo': there is no ratio to clip; it goes with: none"):
        surrogate("none", "ppo")
    with pytest.raises(ValueError, match="clip 'sapo' is not defined on the sequence ratio; it goes with: ppo"):
        surrogate("sequence", "sapo")
    with pytest.raises(ValueError, match=f"Unknown ratio 'x'. Known: {', '.join(RATIOS)}"):
        surrogate("x", "ppo")
    with pytest.raises(ValueError, match=f"Unknown clip 'x'. Known: {', '.join(CLIPS)}"):
        surrogate("token", "x")


# Imitation


def objective(name, b, logp, mode="token-mean"):
    term, loss = IMITATIONS[name], surrogate("token", "ppo")
    b = objectives.weigh_tokens(mode, imitation=term)(b, {}, 1)
    hyper = numbers(loss) | {k: jnp.float32(v) for k, v in term.hyper.items()}
    return objectives.token_objective(loss.surrogate, imitation=term)({"policy": scored(b, logp)}, b, hyper)


def test_expert_tokens_have_a_loss_of_their_own():
    b = conversations(3, expert=(2, 5))
    b = b._replace(logp_old=jnp.minimum(b.logp_old, -0.01))
    logp = moved(b)
    p, o, a = (np.asarray(x, np.float64) for x in (logp, b.logp_old, b.adv))
    mask, expert = np.asarray(b.mask), np.asarray(b.traj.expert)
    own, by = mask & ~expert, mask & expert
    q, old = np.exp(p), np.exp(o)
    clipped = ppo(p, o, a)
    plus = -a * np.sqrt(1 - q) * 2 * q / (old + 0.5 * (1 + old))
    expected = {
        "luffy": (clipped[own].sum() + (-a * q / (q + 0.1))[by].sum()) / mask.sum(),
        "rl-plus": (clipped[own].sum() + plus[by].sum()) / mask.sum(),
        "chord": 0.9 * clipped[own].mean() + 0.1 * -p[by].mean(),
        "chord-phi": 0.9 * clipped[own].mean() + 0.1 * (-q * (1 - q) * p)[by].mean(),
    }
    for name, value in expected.items():
        found, metrics = objective(name, b, logp)
        np.testing.assert_allclose(found, value, rtol=2e-5)
        assert metrics["imitation"][1] == by.sum()


def test_correct_episodes_are_imitated_beside_the_policy_gradient():
    b = conversations(4)
    right = np.asarray([1, 0, 1, 0, 0, 1, 0, 0], bool)
    b = b._replace(extra=b.extra | {"correct": jnp.repeat(jnp.asarray(right)[:, None], b.mask.shape[1], 1)})
    logp = moved(b)
    on = np.asarray(b.mask) & right[:, None]
    clipped = rowwise(b, logp, ORACLES["token", "ppo"])[np.asarray(b.mask)].mean()
    found, _ = objective("positive", b, logp)
    np.testing.assert_allclose(found, clipped + 0.1 * -np.asarray(logp)[on].mean(), rtol=2e-5)


def test_importance_multiplies_the_policys_term_alone():
    b = conversations(5)
    gate = jnp.asarray(np.random.default_rng(0).random(b.mask.shape), jnp.float32)
    loss, logp = surrogate("token", "ppo"), moved(b)
    b = objectives.weigh_tokens("token-mean")(b, {}, 1)
    score = scored(b, logp)._replace(entropy=jnp.ones_like(logp))
    hyper = numbers(loss) | {"entropy_coef": jnp.float32(0.5)}
    run = lambda b: objectives.token_objective(loss.surrogate)({"policy": score}, b, hyper)[0]  # noqa: E731
    mask, clipped = np.asarray(b.mask), rowwise(b, logp, ORACLES["token", "ppo"])
    np.testing.assert_allclose(run(b), clipped[mask].mean() - 0.5, rtol=2e-5)
    gated = b._replace(extra=b.extra | {"importance": gate})
    np.testing.assert_allclose(run(gated), (clipped * np.asarray(gate))[mask].mean() - 0.5, rtol=2e-5)


def test_perception_is_rewarded_up_to_its_bound():
    b = conversations(6)
    loss, logp = surrogate("token", "ppo"), moved(b)
    masked = logp + jnp.where(jnp.arange(b.mask.shape[1]) % 2 == 0, 5.0, -0.5)
    b = objectives.weigh_tokens("token-mean")(b._replace(extra=b.extra | {"logp_masked": masked}), {}, 1)
    hyper = numbers(loss) | {"perception_coef": jnp.float32(0.01), "perception_max": jnp.float32(10.0)}
    found, metrics = objectives.token_objective(loss.surrogate, perception=True)({"policy": scored(b, logp)}, b, hyper)
    d, mask = np.asarray(masked - logp), np.asarray(b.mask)
    k3 = np.exp(d) - 1 - d
    clipped = rowwise(b, logp, ORACLES["token", "ppo"])[mask].mean()
    np.testing.assert_allclose(found, clipped - 0.01 * np.minimum(k3, 10)[mask].mean(), rtol=2e-5)
    np.testing.assert_allclose(metrics["perception"][0] / metrics["perception"][1], k3[mask].mean(), rtol=2e-5)
