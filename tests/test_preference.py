import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import preference

golden = oracles.golden
W, L, REF_W, REF_L = (np.array(x) for x in ([-12.0, -8], [-14, -7.5], [-12.5, -8.2], [-13.5, -7.8]))
LEN_W, LEN_L = np.array([6.0, 4]), np.array([8.0, 5])
PAIR = (W, L, REF_W, REF_L)
MEANS = (W / LEN_W, L / LEN_L)


def near(x, name, **options):
    np.testing.assert_allclose(x, golden(name), **{"atol": 1e-5, "rtol": 1e-5, **options})


def test_dpo_worked_examples():
    loss = call(preference.dpo, *PAIR)
    near(loss, "C1.loss_i")
    near(loss.mean(), "C1.loss")
    near(call(preference.margin, *PAIR), "C1.delta")
    grad = call(jax.grad(lambda w, *rest: preference.dpo(w, *rest).mean(), argnums=(0, 1, 2, 3)), *PAIR)
    near(grad[0], "C1.grad_lw")
    near(-grad[1], "C1.grad_lw")
    assert not grad[2].any() and not grad[3].any()
    rewards = [call(preference.implicit_reward, W, REF_W), call(preference.implicit_reward, L, REF_L)]
    near(np.stack(rewards), "C1.rewards")
    near(call(preference.hinge, *PAIR).mean(), "C1.hinge")
    near((loss - MEANS[0]).mean(), "C12.rpo")


def test_noisy_label_worked_examples():
    near(call(preference.dpo, *PAIR, label_smoothing=0.1).mean(), "C2.cdpo")
    near(preference.robust_dpo(*PAIR, label_noise=0.1).mean(), "C2.robust")
    np.testing.assert_allclose(preference.robust_dpo(*PAIR, label_noise=0.0), call(preference.dpo, *PAIR), atol=1e-6)
    with pytest.raises(ValueError, match=r"label_noise must be in \[0, 0.5\), got 0.5"):
        preference.robust_dpo(*PAIR, label_noise=0.5)


def test_ipo_worked_examples_on_sums_and_means():
    loss = call(preference.ipo, *PAIR)
    near(loss, "C3.ipo.sum_i")
    near(loss.mean(), "C3.ipo.sum")
    means = (W / LEN_W, L / LEN_L, REF_W / LEN_W, REF_L / LEN_L)
    near(call(preference.margin, *means), "C3.ipo.avg.delta")
    near(call(preference.ipo, *means).mean(), "C3.ipo.avg")
    assert float(preference.ipo(5.0, 0.0, 0.0, 0.0)) == 0.0


def test_beta_dpo_worked_examples():
    gap = call(preference.margin, *PAIR)
    beta = call(preference.dynamic_beta, gap, np.float32(0.2))
    near(beta, "C4.beta")
    near(call(preference.dpo, *PAIR, beta=beta).mean(), "C4.loss")
    mean, std = call(preference.gap_moments, np.float32(0.2), np.float32(1.0), gap)
    near(mean, "C4.ema")
    assert float(std) == pytest.approx(0.9 + 0.1 * np.std(gap, ddof=1), rel=1e-5)
    chances = call(preference.gap_probability, np.array([1.0, 0, 0.5, -1, 2]), np.float32(0.5), np.float32(1.0))
    near(chances, "C4.filterp")
    assert float(call(preference.dynamic_beta, gap - 100, np.float32(0.2))) == pytest.approx(1e-3)
    nothing = np.zeros(2, bool)
    kept = call(preference.gap_moments, np.float32(0.2), np.float32(1.0), gap, where=nothing)
    np.testing.assert_allclose(kept, [0.2, 1.0])


def test_kto_worked_examples():
    u, desirable = np.array([0.5, -0.3, 0.2, -0.5]), np.array([1, 1, 0, 0], bool)
    z = call(preference.kto_reference, np.array([0.1, -0.2, 0.3, 0.4]), np.zeros(4))
    near(z, "C5.z")
    loss = call(preference.kto, u, np.zeros(4), desirable, z)
    near(loss, "C5.loss_i")
    near(loss.mean(), "C5.loss")
    near(call(preference.kto, u, np.zeros(4), desirable, z, beta=1.0), "C5.loss_i.b1")
    near(call(preference.kto, u, np.zeros(4), desirable, z, weight_undesirable=1.33).mean(), "C5.weighted")


def test_p24_kto_reference_is_mismatched_clamped_and_detached():
    assert preference.mismatched(3) == [1, 2, 0]
    for count in range(2, 8):
        assert all(i != j for i, j in enumerate(preference.mismatched(count)))
    with pytest.raises(ValueError, match="at least 2 responses, got 1"):
        preference.mismatched(1)
    assert float(call(preference.kto_reference, np.array([-0.3, -0.1]), np.zeros(2))) == 0.0
    grad = call(jax.grad(lambda x: preference.kto_reference(x, jnp.zeros(2))), np.array([0.3, 0.1]))
    np.testing.assert_array_equal(grad, np.zeros(2))
    loss = call(preference.kto, np.array([2.0, -1.0]), np.zeros(2), np.array([True, False]), np.float32(0))
    np.testing.assert_allclose(loss, [0.45016601, 0.47502081], atol=1e-6)
    assert float(call(preference.kto_reference, np.full(2, np.nan), np.zeros(2), where=np.zeros(2, bool))) == 0.0


def test_odds_ratio_worked_examples():
    gap = call(preference.log_odds, MEANS[0]) - call(preference.log_odds, MEANS[1])
    near(gap, "C6.logodds")
    odds = call(preference.lcpo, *MEANS)
    near(odds, "C6.or")
    near(call(preference.orpo, *MEANS).mean(), "C6.loss")
    near(odds.mean(), "C9.loss")
    near(np.exp(MEANS), "C9.p")


def test_simpo_cpo_worked_examples():
    near(MEANS[0] - MEANS[1], "C7.margin")
    loss = call(preference.simpo, *MEANS)
    near(loss, "C7.loss_i")
    near(loss.mean(), "C7.loss")
    near(call(preference.simpo, *MEANS, beta=10.0, gamma=3.0).mean(), "C7.b10")
    near(call(preference.cpo, W, L, -MEANS[0], coef=0.0).mean(), "C8.pref")
    near(call(preference.cpo, W, L, -MEANS[0]).mean(), "C8.loss")
    same = call(preference.simpo, W / 4, L / 4, beta=0.4, gamma=0.0)
    np.testing.assert_allclose(same, call(preference.cpo, W, L, -MEANS[0], coef=0.0), atol=1e-6)


def test_step_and_multi_turn_worked_examples():
    near(call(preference.dpo, *PAIR, beta=0.4).mean(), "C10")
    ratio_w, ratio_l = np.array([[0.3, 0.2, 0.1]]), np.array([[-0.2, 0.4, np.nan]])
    turns = np.array([3]), np.array([2])
    near(call(preference.dmpo_weights, turns[0], 3, discount=0.7)[0], "C11.phiw")
    near(call(preference.dmpo_weights, turns[1], 3, discount=0.7)[0, :2], "C11.phil")
    near(call(preference.dmpo_weights, turns[0], 3, discount=1.0)[0], "C11.phi1")
    np.testing.assert_allclose(call(preference.dmpo_weights, turns[0], 3, discount=0.0)[0], [1, 0, 0])
    near(call(preference.dmpo, ratio_w, ratio_l, *turns)[0], "C11.loss")
    near(call(preference.dmpo, ratio_w, ratio_l, *turns, beta=1.0)[0], "C11.loss.b1")


def test_reward_model_worked_examples():
    better, worse = np.array([1.2, 0.3]), np.array([0.7, 0.5])
    near(call(preference.bradley_terry, better, worse).mean(), "C13.loss")
    near(call(preference.bradley_terry, better, worse, label_margin=0.5).mean(), "C13.margin")
    near(call(preference.bradley_terry, better, worse, centre_coef=0.01).mean(), "C13.center")


@pytest.mark.parametrize("discount", [0.7, 0.999, 1.0])
def test_dmpo_equals_the_oracle(discount):
    rng = np.random.default_rng(0)
    w, l = rng.normal(size=(2, 6, 4))  # noqa: E741
    turns = rng.integers(1, 5, (2, 6))
    got = call(preference.dmpo, w, l, *turns, beta=0.5, discount=discount)
    want = [oracles.dmpo(w[i, : turns[0, i]], l[i, : turns[1, i]], 0.5, discount) for i in range(6)]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_dmpo_of_one_turn_is_dpo():
    one = np.ones(2, int)
    got = call(preference.dmpo, (W - REF_W)[:, None], (L - REF_L)[:, None], one, one)
    np.testing.assert_allclose(got, call(preference.dpo, *PAIR), atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-30, -0.1), min_size=8, max_size=8))
def test_losses_and_gradients_equal_the_oracles(values):
    w, l, ref_w, ref_l = np.array(values).reshape(4, 2)  # noqa: E741
    for smoothing in (0.0, 0.2):
        fn = functools.partial(oracles.dpo, beta=0.3, smoothing=smoothing)
        value, grad = call(dpo_graded, w, l, ref_w, ref_l, smoothing=smoothing)
        want = [fn(*row) for row in zip(w, l, ref_w, ref_l, strict=True)]
        np.testing.assert_allclose(value, sum(want), rtol=1e-4, atol=1e-5)
        slope = oracles.numeric_grad(lambda x, f=fn: sum(f(*r) for r in zip(x, l, ref_w, ref_l, strict=True)), w)
        np.testing.assert_allclose(grad, slope, atol=1e-4)
    odds = [oracles.log_odds(a) - oracles.log_odds(b) for a, b in zip(w, l, strict=True)]
    np.testing.assert_allclose(
        call(preference.lcpo, w, l), [-oracles.log_sigmoid(x) for x in odds], rtol=1e-3, atol=1e-5
    )


# Numbers; which arguments are learned; which others could carry a gradient, and must not.
FORMULAS = {
    "robust_dpo": ({"beta": 0.3, "label_noise": 0.2}, (0, 1), (2, 3)),
    "hinge": ({"beta": 0.3}, (0, 1), (2, 3)),
    "ipo": ({"beta": 0.3}, (0, 1), (2, 3)),
    "kto": ({"beta": 0.3, "weight_desirable": 1.2, "weight_undesirable": 0.7}, (0,), (1, 3)),
    "lcpo": ({}, (0, 1), ()),
    "orpo": ({"coef": 0.3}, (0, 1), ()),
    "simpo": ({"beta": 2.5, "gamma": 0.7}, (0, 1), ()),
    "cpo": ({"beta": 0.3, "coef": 0.5}, (0, 1, 2), ()),
    "bradley_terry": ({"label_margin": 0.4, "centre_coef": 0.1}, (0, 1), ()),
}


@functools.cache
def summed(name):
    """The sum over pairs, with its gradient in every argument that a gradient could reach."""
    fn, (_, moving, held) = getattr(preference, name), FORMULAS[name]
    return jax.value_and_grad(lambda *a, **numbers: fn(*a, **numbers).sum(), argnums=(*moving, *held))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(3))
def test_every_other_loss_and_its_gradient_equal_the_oracle(name, seed):
    rng = np.random.default_rng(seed)
    numbers, moving, held = FORMULAS[name]
    arrays = list(-rng.gamma(2.0, 1.5, (max(moving + held) + 1, 6)))
    if name == "kto":
        arrays[2:] = [rng.random(6) < 0.5, -arrays[3]]
    value, grads = call(summed(name), *arrays, **numbers)

    def total(*x):
        return sum(getattr(oracles, name)(*row, **numbers) for row in zip(*x, strict=True))

    assert float(value) == pytest.approx(total(*arrays), rel=1e-4)
    for i, grad in zip(moving, grads, strict=False):
        slope = oracles.numeric_grad(lambda x, i=i: total(*arrays[:i], x, *arrays[i + 1 :]), arrays[i])
        np.testing.assert_allclose(grad, slope, rtol=1e-3, atol=1e-4)
        assert np.abs(slope).max() > 1e-2
    assert not any(np.any(grad) for grad in grads[len(moving) :])


dpo_graded = jax.value_and_grad(lambda *a, smoothing: preference.dpo(*a, beta=0.3, label_smoothing=smoothing).sum())
EVERY = {
    "dpo": lambda x, y: preference.dpo(x, y, 0.0, 0.0, beta=0.5, label_smoothing=0.1),
    "robust": lambda x, y: preference.robust_dpo(x, y, 0.0, 0.0, beta=0.5, label_noise=0.1),
    "hinge": lambda x, y: preference.hinge(x, y, 0.0, 0.0),
    "ipo": lambda x, y: preference.ipo(x, y, 0.0, 0.0),
    "kto": lambda x, y: preference.kto(x, 0.0, y > x, jnp.maximum(y, 0.0)),
    "orpo": preference.orpo,
    "lcpo": preference.lcpo,
    "simpo": preference.simpo,
    "cpo": lambda x, y: preference.cpo(x, y, -x),
    "dmpo": lambda x, y: preference.dmpo(x[:, None], y[:, None], jnp.ones(4, int), jnp.ones(4, int)),
    "bradley_terry": preference.bradley_terry,
}
GRADED = {name: jax.value_and_grad(lambda x, y, f=f: f(x, y).sum(), argnums=(0, 1)) for name, f in EVERY.items()}


@pytest.mark.parametrize("name", EVERY)
def test_p20_everything_is_finite_at_extreme_margins(name):
    value, grads = call(GRADED[name], np.array([0.0, -1e-9, -1e4, -50.0]), np.array([-1e4, 0.0, 0.0, -1e-9]))
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_equal_policies_give_log_two():
    zero = np.zeros(2)
    np.testing.assert_allclose(call(preference.dpo, zero, zero, zero, zero), np.log(2), rtol=1e-6)


def test_observation_tokens_stay_out_of_sequences_and_turns():
    logp, ref, _, _, mask = oracles.ragged(3)
    dirty = np.where(mask, logp, np.nan)
    np.testing.assert_allclose(call(preference.sequence_logp, dirty, mask), (logp * mask).sum(1), rtol=1e-5)
    mean = call(preference.sequence_logp, dirty, mask, average=True)
    np.testing.assert_allclose(mean, (logp * mask).sum(1) / np.maximum(mask.sum(1), 1), rtol=1e-5)
    turn = np.array([0, 0, 1, 1, 2, 2, -1])
    row = int(np.argmax(mask.sum(1)))
    got = call(preference.turn_log_ratio, dirty[row], ref[row], mask[row], turn, 3)
    want = [((logp - ref)[row] * (mask[row] & (turn == k))).sum() for k in range(3)]
    np.testing.assert_allclose(got, want, atol=1e-5)
    picked = call(
        preference.segment_mask, mask, np.broadcast_to(turn, mask.shape), np.array([1] * 5), np.array([2] * 5)
    )
    np.testing.assert_array_equal(picked, mask & (turn >= 1))
