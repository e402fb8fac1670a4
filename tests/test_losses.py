import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import losses
from agentrl_jax.importance import importance_weight, normalise_weight, offpolicy_keep, veto
from agentrl_jax.masked import aggregate, aggregation_weights, masked_sum

golden = oracles.golden
OLD = np.array([[-1.0, -0.5, -2.0, -0.7], [-0.3, -1.2, -0.9, -1.5]])
LOGP = np.array([[-0.7, -0.6, -1.5, -0.7], [-0.6, -1.0, -1.3, -0.2]])
REF = np.array([[-1.1, -0.4, -1.9, -0.9], [-0.4, -1.1, -1.0, -1.4]])
BEH = np.array([[-1.05, -0.45, -2.5, -0.7], [-0.3, -1.3, -0.9, -1.7]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
ADV = np.array([[1.0] * 4, [-0.5] * 4])
SEQ = np.array([1.0, -0.5])


SHAPE = (5, 7)


@functools.cache
def weighted(fn):
    """The aggregated loss with its gradient in the first argument: one function object a loss, so that it caches."""

    def run(logp, *arrays, mask, weight, **options):
        loss = fn(logp, *arrays, mask=mask, **options)
        return jnp.sum(loss * (weight if loss.ndim == mask.ndim else weight.sum(-1)))

    return jax.value_and_grad(run)


def padded(x):
    """Fully masked rows and columns change nothing, so that all cases share one shape and one compilation."""
    x = np.asarray(x)
    return np.pad(x, [(0, full - size) for full, size in zip(SHAPE, x.shape, strict=False)])


def graded(fn, *arrays, mode="token-mean", mask=MASK, **options):
    mode = "seq-mean-token-mean" if fn in (losses.gspo, losses.gmpo) else mode
    weight = call(aggregation_weights, padded(mask), mode)
    value, grad = call(weighted(fn), *map(padded, arrays), mask=padded(mask), weight=weight, **options)
    rows, columns = mask.shape
    return value, grad[:rows, :columns]


def check(result, value, grad=None):
    assert float(result[0]) == pytest.approx(float(golden(value)), abs=1e-5)
    if grad is not None:
        np.testing.assert_allclose(result[1], golden(grad), atol=1e-5)


# worked examples


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_policy_gradient_worked_example(mode):
    adv = np.array([[0.5] * 4, [-0.5] * 4])
    grad = "A1.grad.token-mean" if mode == "token-mean" else None
    check(graded(losses.policy_gradient, LOGP, adv, mode=mode), f"A1.{mode}", grad)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_ppo_and_dapo_worked_examples(mode):
    token = mode == "token-mean"
    check(graded(losses.ppo_clip, LOGP, OLD, ADV, mode=mode), f"B2.{mode}", "B2.grad" if token else None)
    dual = graded(losses.ppo_clip, LOGP, OLD, ADV, mode=mode, dual_clip=3.0)
    check(dual, f"B2.dual.{mode}", "B2.dual.grad" if token else None)
    check(graded(losses.ppo_clip, LOGP, OLD, ADV, mode=mode, eps_high=0.28), f"B4.dapo.{mode}")
    check(graded(losses.ppo_clip, LOGP, OLD, ADV, mode=mode, eps_high=0.28, dual_clip=3.0), f"B4.dapo.dual.{mode}")


def test_per_token_worked_examples():
    for options, name in (
        ({}, "B2.tok"),
        ({"dual_clip": 3.0}, "B2.tok.dual"),
        ({"eps_high": 0.28}, "B4.tok"),
        ({"ratio_max": 1.5}, "B2.delta1p5.tok"),
    ):
        np.testing.assert_allclose(call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK, **options), golden(name), atol=1e-5)
    cut = call(losses.clipped, LOGP, OLD, ADV, mask=MASK, dual_clip=3.0)
    shares = [np.mean(np.asarray(x)[MASK]) for x in (cut.high, cut.low, cut.dual)]
    np.testing.assert_allclose(shares, golden("B2.clipfrac.low_high_dual"), atol=1e-6)


def test_dr_grpo_and_empty_rows_worked_examples():
    tokens = call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK)
    mode = "seq-mean-token-sum-norm"
    assert float(call(aggregate, tokens, MASK, mode, norm=4)) == pytest.approx(float(golden("B5.drgrpo.T4")), abs=1e-6)
    long = float(call(aggregate, tokens, MASK, mode, norm=3000))
    assert long == pytest.approx(float(golden("B5.drgrpo.L3000")), rel=1e-4)
    three = [np.concatenate([x, x[:1]]) for x in (LOGP, OLD, ADV)]
    mask = np.concatenate([MASK, np.zeros((1, 4), bool)])
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert float(graded(losses.ppo_clip, *three, mode=mode, mask=mask)[0]) == pytest.approx(
            float(golden(f"B1.emptyrow.{mode}")), abs=1e-5
        )


def test_grpo_worked_example():
    mode = "seq-mean-token-mean"
    policy = graded(losses.ppo_clip, LOGP, OLD, ADV, mode=mode)[0]
    term = 0.04 * graded(losses.kl, LOGP, REF, mode=mode, estimator="k3")[0]
    assert float(term) == pytest.approx(float(golden("B3.grpo.kl")), abs=1e-6)
    assert float(policy + term) == pytest.approx(float(golden("B3.grpo")), abs=1e-5)


def test_value_worked_examples():
    value, old, target = np.array([0.5, 0.1, 0.9]), np.array([0.2, 0.2, 0.8]), np.array([1.0, 0, 1])
    clipped = call(losses.value_clip, value, old, target, eps=0.2)
    np.testing.assert_allclose(clipped, golden("B2.vclip.tok"), atol=1e-6)
    assert call(losses.value_loss, value, target).mean() == pytest.approx(float(golden("B2.vnoclip")))


def test_p22_value_clip_takes_the_larger_square():
    fn = jax.value_and_grad(lambda v, old: losses.value_clip(v, old, jnp.full(2, 10.0), eps=0.2).sum())
    values = call(losses.value_clip, np.array([1.0, 5.0]), np.array([5.0, 1.0]), np.full(2, 10.0), eps=0.2)
    np.testing.assert_allclose(values, [40.5, 38.72], rtol=1e-6)
    _, grad = call(fn, np.array([1.0, 5.0]), np.array([5.0, 1.0]))
    np.testing.assert_allclose(grad, [-9.0, 0.0], atol=1e-6)


def test_gspo_worked_examples():
    options = {"eps_low": 3e-4, "eps_high": 4e-4}
    check(graded(losses.gspo, LOGP, OLD, SEQ, **options), "B6.loss.paper", "B6.grad.paper")
    wide = {"eps_low": 0.2, "eps_high": 0.6}
    check(graded(losses.gspo, LOGP, OLD, SEQ, **wide), "B6.loss.wide6", "B6.grad.wide")
    token = graded(losses.gspo_token, LOGP, OLD, ADV, mode="seq-mean-token-mean", **wide)
    check(token, "B6.token.loss", "B6.grad.wide")
    check(graded(losses.gspo, LOGP, OLD, ADV, **wide), "B6.loss.wide6")
    with pytest.raises(ValueError, match="adv has shape"):
        losses.gspo(LOGP, OLD, np.ones(3), MASK)


def test_gmpo_worked_examples():
    check(graded(losses.gmpo, LOGP, OLD, SEQ, eps_low=0.35, eps_high=0.35), "B7.loss", "B7.grad")
    check(graded(losses.gmpo, LOGP, OLD, SEQ), "B7.loss.40")


def test_cispo_and_sapo_worked_examples():
    check(graded(losses.cispo, LOGP, OLD, ADV, eps_low=0.2, eps_high=0.28), "B8.loss", "B8.grad")
    check(graded(losses.cispo, LOGP, OLD, ADV, eps_high=4.0), "B8.abs5")
    np.testing.assert_allclose(call(losses.sapo, LOGP, OLD, ADV, mask=MASK), golden("B9.tok"), atol=1e-5)
    check(graded(losses.sapo, LOGP, OLD, ADV), "B9.tokmean", "B9.grad")
    check(graded(losses.sapo, LOGP, OLD, ADV, mode="seq-mean-token-mean"), "B9.seqmean")
    on_policy = call(losses.sapo, OLD, OLD, np.ones_like(OLD), mask=MASK)[MASK]
    np.testing.assert_allclose(on_policy, golden("B9.tok.onpolicy"))


def test_decoupled_ppo_worked_examples():
    check(graded(losses.decoupled_ppo, LOGP, OLD, BEH, ADV), "B11.loss")
    check(graded(losses.ppo_clip, LOGP, BEH, ADV), "B11.naive")


def test_importance_weight_worked_examples():
    weigh = functools.partial(call, importance_weight, OLD, BEH, MASK)
    tokens = call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK)

    def loss(weight):
        return float(call(aggregate, weight * tokens, MASK, "token-mean"))

    np.testing.assert_allclose(weigh(rule="none"), golden("B10.w"), atol=1e-5)
    np.testing.assert_allclose(weigh(), golden("B10.tis2"), atol=1e-5)
    np.testing.assert_allclose(weigh(high=1.3), golden("B10.tis1p3"), atol=1e-5)
    assert loss(weigh(high=1.3)) == pytest.approx(float(golden("B10.loss")), abs=1e-5)
    np.testing.assert_allclose(weigh(rule="mask", low=0.5, high=1.3), golden("B10.icepop"), atol=1e-5)
    assert loss(weigh(rule="mask", low=0.5, high=1.3)) == pytest.approx(float(golden("B10.loss.icepop")), abs=1e-5)
    np.testing.assert_allclose(weigh(level="sequence", rule="none")[:, 0], golden("B10.seq"), atol=1e-5)
    np.testing.assert_allclose(weigh(level="geometric", rule="none")[:, 0], golden("B10.geo"), atol=1e-5)
    assert loss(weigh(level="sequence", high=1.5)) == pytest.approx(float(golden("B10.loss.seqtis")), abs=1e-5)
    rejected = loss(weigh(level="sequence", rule="mask", high=1.5))
    assert rejected == pytest.approx(float(golden("B10.loss.seqmis")), abs=1e-5)
    np.testing.assert_allclose(call(normalise_weight, weigh(high=1.3), MASK), golden("B10.batchnorm"), atol=1e-5)


def test_p21_truncated_weights():
    old, rollout = np.array([[-1.0, -1, -1]]), np.array([[-1.0, -3, -0.5]])
    on = np.ones((1, 3), bool)
    weight = call(importance_weight, old, rollout, on)
    np.testing.assert_allclose(weight, [[1.0, 2.0, 0.60653066]], atol=1e-6)
    assert weight[0, 0] == 1.0
    assert (-weight).mean() == pytest.approx(-1.20217689)
    grad = call(jax.grad(lambda x: importance_weight(x, rollout, on).sum()), old)
    np.testing.assert_array_equal(grad, np.zeros((1, 3)))
    long = np.full((1, 1000), -0.002), np.zeros((1, 1000)), np.ones((1, 1000), bool)
    assert call(importance_weight, *long, level="sequence")[0, 0] == pytest.approx(0.135335, abs=1e-5)
    assert call(importance_weight, *long, level="geometric")[0, 0] == pytest.approx(0.998002, abs=1e-5)
    with pytest.raises(ValueError, match="logp_behaviour has shape"):
        importance_weight(old, rollout[0], on)
    with pytest.raises(ValueError, match=r"Unknown level 'seq'. Known: token, sequence, geometric"):
        importance_weight(old, rollout, on, level="seq")


def test_tokens_of_unknown_probability_keep_weight_one():
    known = MASK & (np.arange(4) > 0)
    weight = call(importance_weight, OLD, BEH, MASK, known=known, level="sequence", rule="none")
    assert weight[0, 0] == weight[1, 0] == 1.0
    assert weight[0, 1] == pytest.approx(np.exp((OLD - BEH)[0, 1:3].sum()), rel=1e-5)


def test_veto_and_off_policy_masking_decide_by_sequence():
    far = np.where(np.arange(4) == 1, BEH + 20, BEH)
    np.testing.assert_array_equal(call(veto, OLD, np.stack([far[0], BEH[1]]), MASK), [False, True])
    drifted = np.stack([OLD[0] - 1, OLD[1] - 1])
    np.testing.assert_array_equal(call(offpolicy_keep, drifted, OLD, ADV, MASK, delta=0.5), [True, False])
    np.testing.assert_array_equal(call(offpolicy_keep, drifted, OLD, ADV, MASK, delta=2.0), [True, True])


def test_asymmetric_is_worked_example():
    slope = jax.grad(lambda x, adv: losses.asymmetric_is(x, jnp.zeros_like(x), adv).sum())

    def weights(ratio, adv):
        return call(slope, np.log(ratio), np.full(len(ratio), adv)) / -adv

    np.testing.assert_allclose(weights([0.25, 0.8, 1, 1.1, 1.5], 2.0), golden("A32.asym.pos"), atol=1e-5)
    np.testing.assert_allclose(weights([0.5, 0.9, 1.5, 4], -2.0), golden("A32.asym.neg"), atol=1e-5)


def test_luffy_and_chord_worked_examples():
    u = np.array([0.05, 0.5, 0.95])
    grad = call(jax.grad(lambda x: losses.luffy(x, jnp.ones(3)).sum()), np.log(u))
    np.testing.assert_allclose(-call(losses.luffy, np.log(u), np.ones(3)), golden("A33.luffy"), atol=1e-5)
    np.testing.assert_allclose(-grad, golden("A33.luffy.gradw"), atol=1e-5)
    logp = np.log([0.9, 0.5, 0.1])
    phi = call(losses.chord_phi, logp)
    np.testing.assert_allclose(phi / -logp, golden("A30.phi"), atol=1e-5)
    assert phi.mean() == pytest.approx(float(golden("A30.loss")), abs=1e-6)
    assert float(losses.mix(0.2, phi.mean(), 0.1)) == pytest.approx(float(golden("A30.total")), abs=1e-6)
    grad = call(jax.grad(lambda x: losses.dft(x).sum()), logp)
    np.testing.assert_allclose(grad, [-0.9, -0.5, -0.1], atol=1e-6)


def test_chord_share_rises_then_falls():
    mu = [float(call(losses.chord_mu, np.float32(s), warmup=4.0, decay=10.0)) for s in (0, 3, 4, 9, 14, 99)]
    np.testing.assert_allclose(mu, [0.9 / 4, 0.9, 0.9, 0.475, 0.05, 0.05], atol=1e-6)


def test_rl_plus_formula_and_gradient():
    p, old, adv = 0.3, 0.2, 1.5
    fn = jax.value_and_grad(losses.rl_plus)
    value, grad = call(fn, np.float32(np.log(p)), np.float32(np.log(old)), np.float32(adv))
    want = -adv * (1 - p) ** 0.5 * 2 * p / (old + 0.5 * (1 + old))
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert float(grad) == pytest.approx(want, rel=1e-5)


def test_awr_worked_examples():
    adv, logp = np.array([1, -0.5, 0]), np.array([-2, -1.5, -3])
    weight = call(losses.awr_weight, adv, beta=0.5)
    np.testing.assert_allclose(weight, golden("B13.w"), rtol=1e-5)
    loss = call(losses.awr, logp, adv, beta=0.5)
    assert loss.mean() == pytest.approx(float(golden("B13.loss")), rel=1e-5)
    assert loss.sum() / weight.sum() == pytest.approx(float(golden("B13.loss.norm")), rel=1e-5)
    capped = call(losses.awr_weight, np.array([4.0, 1e6, 0.0]), beta=0.5)
    np.testing.assert_allclose(capped, [golden("B13.w.clip"), 20.0, 1.0], rtol=1e-5)
    row = call(aggregate, call(losses.nll, LOGP[:1], mask=MASK[:1]), MASK[:1], "token-mean")
    assert float(row) == pytest.approx(float(golden("B13.raft")))


def test_positive_nll_averages_over_correct_tokens():
    correct = np.broadcast_to(np.array([[True], [False]]), MASK.shape)
    loss = call(losses.positive_nll, LOGP, correct, mask=MASK)
    assert float(call(aggregate, loss, MASK & correct, "token-mean")) == pytest.approx(2.8 / 3)
    assert not loss[1].any()


# against the oracles


ELEMENTWISE = [
    ("ppo_clip", {}, oracles.ppo),
    (
        "ppo_clip",
        {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 2.0},
        lambda p, o, a: oracles.ppo(p, o, a, 0.1, 0.3, 2),
    ),
    ("ppo_clip", {"ratio_max": 1.4}, lambda p, o, a: oracles.ppo(p, o, a, ratio_max=1.4)),
    ("sapo", {"tau_pos": 0.7}, lambda p, o, a: oracles.sapo(p, o, a, 0.7)),
]


@pytest.mark.parametrize(("name", "options", "oracle"), ELEMENTWISE)
@pytest.mark.parametrize("seed", range(3))
def test_elementwise_losses_and_gradients_equal_the_oracles(name, options, oracle, seed):
    logp, old, _, adv, mask = oracles.ragged(seed)
    value, grad = graded(getattr(losses, name), logp, old, adv, mask=mask, mode="token-sum", **options)

    def total(x):
        return oracles.per_token(oracle, mask, x, old, adv).sum()

    assert float(value) == pytest.approx(total(logp), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(grad, oracles.numeric_grad(total, logp), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "low", "high"), [("gspo", 0.2, 0.3), ("gmpo", 0.4, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_losses_and_gradients_equal_the_oracles(name, low, high, seed):
    logp, old, _, adv, mask = oracles.ragged(seed)
    value, grad = graded(getattr(losses, name), logp, old, adv[:, 0], mask=mask, eps_low=low, eps_high=high)

    def mean(x):
        return getattr(oracles, name)(x, old, adv[:, 0], mask, low, high).sum() / mask.any(1).sum()

    assert float(value) == pytest.approx(mean(logp), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(grad, oracles.numeric_grad(mean, logp), atol=2e-4, rtol=2e-4)


# What each reads beside logp, its numbers, and its oracle of (logp, logp held by a stop-gradient, those read).
HELD = {
    "asymmetric_is": (
        ("old", "adv"), {"eps_low": 0.3, "eps_high": 0.1, "cap": 1.5},
        lambda p, h, o, a: oracles.asymmetric_is(p, h, o, a, 0.3, 0.1, 1.5),
    ),
    "decoupled_ppo": (
        ("old", "beh", "adv"), {"eps_low": 0.1, "eps_high": 0.3, "cap": 1.5},
        lambda p, h, o, b, a: oracles.decoupled_ppo(p, o, b, a, 0.1, 0.3, 1.5),
    ),
    "cispo": (
        ("old", "adv"), {"eps_low": 0.3, "eps_high": 0.2},
        lambda p, h, o, a: oracles.cispo(h, o, a, 0.3, 0.2) / h * p,
    ),
    "rl_plus": (("old", "adv"), {"power": 0.7}, lambda p, h, o, a: oracles.rl_plus(p, h, o, a, 0.7)),
    "luffy": (("adv",), {"gamma": 0.2}, lambda p, h, a: oracles.luffy(p, a, 0.2)),
    "chord_phi": ((), {}, oracles.chord_phi),
    "dft": ((), {}, oracles.dft),
    "awr": (("adv",), {"beta": 0.5, "weight_max": 3.0}, lambda p, h, a: oracles.awr(p, a, 0.5, 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("seed", range(3))
def test_losses_with_held_weights_and_their_gradients_equal_the_oracles(name, seed):
    logp, old, beh, adv, mask = oracles.ragged(seed)
    reads, options, oracle = HELD[name]
    rest = [{"old": old, "beh": beh, "adv": adv}[key] for key in reads]
    value, grad = graded(getattr(losses, name), logp, *rest, mask=mask, mode="token-sum", **options)

    def total(x):
        return oracles.per_token(oracle, mask, x, logp, *rest).sum()

    assert float(value) == pytest.approx(total(logp), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(grad, oracles.numeric_grad(total, logp), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_and_its_gradient_equal_the_oracle(seed):
    logp, old, _, adv, mask = oracles.ragged(seed)
    value, grad = graded(losses.gspo_token, logp, old, adv, mask=mask, mode="token-sum", eps_low=0.2, eps_high=0.3)

    def total(x):
        return oracles.gspo_token(x, logp, old, adv, mask, 0.2, 0.3).sum()

    assert float(value) == pytest.approx(total(logp), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(grad, oracles.numeric_grad(total, logp), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_and_value_losses_equal_the_oracles(seed):
    logp, old, ref, adv, mask = oracles.ragged(seed)
    got = call(losses.cispo, logp, old, adv, mask=mask, eps_low=0.3, eps_high=0.2)
    want = oracles.per_token(lambda p, o, a: oracles.cispo(p, o, a, 0.3, 0.2), mask, logp, old, adv)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    value, grad = graded(losses.value_clip, logp, old, ref, mask=mask, mode="token-sum", eps=0.2)

    def total(x):
        return oracles.per_token(lambda v, o, g: oracles.value_clip(v, o, g, 0.2), mask, x, old, ref).sum()

    assert float(value) == pytest.approx(total(logp), rel=1e-5)
    np.testing.assert_allclose(grad, oracles.numeric_grad(total, logp), atol=2e-4)


# identities and properties

RATIO_LOSSES = {
    "ppo_clip": {},
    "gspo_token": {},
    "cispo": {},
    "sapo": {},
    "asymmetric_is": {},
    "decoupled_ppo": {},
    "gspo": {},
    "gmpo": {},
    "kl_cov": {},
}


def invoke(name, logp, old, adv, mask, **options):
    """Every ratio loss through one door: gradient and value under its own aggregation."""
    extra = {"decoupled_ppo": [old, old, adv], "kl_cov": [old, adv, np.zeros_like(mask)]}.get(name, [old, adv])
    mode = "seq-mean-token-mean" if name in ("gspo", "gspo_token", "gmpo") else "token-mean"
    return graded(getattr(losses, name), logp, *extra, mask=mask, mode=mode, **options), mode


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_p16_first_step_is_the_policy_gradient_under_the_same_aggregation(name):
    logp, _, _, adv, mask = oracles.ragged(1)
    adv = np.broadcast_to(adv[:, :1], adv.shape)
    (_, grad), mode = invoke(name, logp, logp, adv, mask)
    _, want = graded(losses.policy_gradient, logp, adv, mask=mask, mode=mode)
    np.testing.assert_allclose(grad, want, atol=1e-6)
    assert np.abs(grad).max() > 0.01


def test_p16_surrogate_value_zero_gradient_not():
    logits, action, adv = jnp.array([[0.2, -0.1, 0.4], [0, 0.5, -0.5]]), jnp.array([2, 0]), jnp.array([1.0, -1.0])

    def loss(x, fn):
        logp = jnp.take_along_axis(jax.nn.log_softmax(x), action[:, None], 1)[:, 0]
        return fn(logp).mean()

    clip = jax.value_and_grad(functools.partial(loss, fn=lambda p: losses.ppo_clip(p, p, adv)))
    value, grad = call(clip, logits)
    assert float(value) == pytest.approx(0.0, abs=1e-7)
    want = [[0.168792, 0.125044, -0.293837], [0.346402, -0.253240, -0.093162]]
    np.testing.assert_allclose(grad, want, atol=1e-5)
    plain = jax.grad(functools.partial(loss, fn=lambda p: losses.policy_gradient(p, adv)))
    np.testing.assert_allclose(call(plain, logits), want, atol=1e-5)


def test_p18_dual_clip_is_for_negative_advantages():
    ratio, adv = np.array([10, 2, 0.5, 10, 0.5, 1]), np.array([-1.0, -1, -1, 1, 1, 1])
    loss = call(losses.ppo_clip, np.log(ratio), np.zeros(6), adv, dual_clip=3.0)
    np.testing.assert_allclose(loss, [3.0, 2.0, 0.8, -1.2, -0.5, -1.0], rtol=1e-5)
    grad = call(jax.grad(lambda *a: losses.ppo_clip(*a, dual_clip=3.0).sum()), np.log(ratio), np.zeros(6), adv)
    np.testing.assert_allclose(grad, -adv * ratio * [0, 1, 0, 0, 1, 1], rtol=1e-5)


def test_p18_bad_ranges_are_refused():
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=r"dual_clip must be above 1.0, got 1.0"):
        losses.ppo_clip(x, x, x, dual_clip=1.0)
    with pytest.raises(ValueError, match="eps_low must be at least"):
        losses.ppo_clip(x, x, x, eps_low=-0.1)
    with pytest.raises(ValueError, match=r"adv has shape \(2,\), expected \(1,\)"):
        losses.ppo_clip(x, x, jnp.zeros(2))


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("size", [200.0, -200.0])
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_p20_extreme_ratios_are_finite_and_stay_in_their_row(name, size, adv):
    logp, old, _, plain, mask = oracles.ragged(1)
    row = int(np.argmax(mask.sum(1)))
    bad = np.where(np.arange(len(mask))[:, None] == row, old + size, logp)
    plain = np.broadcast_to(plain[:, :1], plain.shape).copy()
    plain[row] = adv
    (value, grad), _ = invoke(name, bad, old, plain, mask)
    assert np.isfinite(value) and np.isfinite(grad).all()
    (_, clean), _ = invoke(name, logp, old, plain, mask)
    others = np.arange(len(mask)) != row
    np.testing.assert_allclose(grad[others], clean[others], atol=1e-6)


def test_p20_clipped_tokens_have_exactly_zero_gradient():
    size, adv = np.array([200.0, 0.5, -0.5, -200.0]), np.array([1.0, 1.0, -1.0, -1.0])
    grad = call(jax.grad(lambda *a: losses.ppo_clip(*a).sum()), size, np.zeros(4), adv)
    np.testing.assert_array_equal(grad, np.zeros(4))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_garbage_in_masked_slots_changes_neither_value_nor_gradient(name, garbage):
    logp, old, _, adv, mask = oracles.ragged(4)
    (value, grad), _ = invoke(name, logp, old, adv, mask)
    dirty = [np.where(mask, x, garbage) for x in (logp, old, adv)]
    (dirty_value, dirty_grad), _ = invoke(name, *dirty, mask)
    assert float(value) == float(dirty_value)
    np.testing.assert_array_equal(grad, dirty_grad)


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_p03_nothing_counted_gives_zero(name):
    nothing = np.zeros((2, 4), bool)
    (value, grad), _ = invoke(name, np.full((2, 4), np.nan), OLD, ADV, nothing)
    assert float(value) == 0.0 and not grad.any()


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_p26_observation_tokens_get_no_gradient_and_written_ones_do(name):
    logp, old, _, adv, mask = oracles.ragged(6)
    near = old + 0.05 * np.sign(logp - old)
    options = {"eps_low": 0.2, "eps_high": 0.2} if "gspo" in name else {}
    (_, grad), _ = invoke(name, near, old, adv + np.sign(adv), mask, **options)
    assert not grad[~mask].any() and grad[mask].all()
    (other, _), _ = invoke(name, near, old, adv, ~mask)
    (value, _), _ = invoke(name, near, old, adv, mask)
    assert float(other) != float(value)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.permutations(range(5)))
def test_padding_and_row_order_change_no_loss(seed, order):
    logp, old, _, adv, mask = oracles.ragged(seed)
    (value, grad), _ = invoke("ppo_clip", logp, old, adv, mask)
    order = list(order)
    (again, permuted), _ = invoke("ppo_clip", logp[order], old[order], adv[order], mask[order])
    assert float(again) == pytest.approx(float(value), rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(permuted, grad[order], atol=1e-6)
    width = 1 + int(np.nonzero(mask.any(0))[0].max())
    (cut, _), _ = invoke("ppo_clip", *(x[:, :width] for x in (logp, old, adv, mask)))
    assert float(cut) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


def test_dual_clip_decoupling_and_truncation_reduce_to_ppo():
    plain = call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK)
    dual = call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK, dual_clip=3.0)
    beyond = (ADV < 0) & (np.exp(LOGP - OLD) > 3) & MASK
    np.testing.assert_array_equal(dual != plain, beyond)
    sided = call(losses.ppo_clip, LOGP, OLD, ADV, mask=MASK, ratio_max=3.0)
    np.testing.assert_allclose(sided, dual, atol=1e-6)
    np.testing.assert_allclose(call(losses.decoupled_ppo, LOGP, OLD, OLD, ADV, mask=MASK), plain, atol=1e-6)


def test_rloo_sequence_ratio_is_ppo_on_sums():
    totals = [call(masked_sum, x, MASK, -1) for x in (LOGP, OLD)]
    got = call(losses.ppo_clip, *totals, SEQ)
    ratio = np.exp(((LOGP - OLD) * MASK).sum(1))
    np.testing.assert_allclose(got, np.maximum(-SEQ * ratio, -SEQ * np.clip(ratio, 0.8, 1.2)), rtol=1e-5)


def test_retrieved_tokens_masked_worked_example():
    mask = MASK.copy()
    mask[0, 1:3] = False
    check(graded(losses.ppo_clip, LOGP, OLD, ADV, mask=mask), "D.searchr1")
