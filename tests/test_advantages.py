import functools

import jax
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import advantages
from agentrl_jax.masked import whiten
from agentrl_jax.statistics import kl_in_reward

golden = oracles.golden
SIZE = 9


def run(name, *arrays, **options):
    return call(getattr(advantages, name), *arrays, **options)


def compiled(name, **options):
    return functools.partial(run, name, **options)


def episode(seed, size=SIZE):
    rng = np.random.default_rng(seed)
    mask = rng.random(size) < 0.6
    turn = np.cumsum(np.r_[True, mask[:-1] & ~mask[1:]]) - 1
    return rng.normal(size=size), rng.normal(size=size), mask, turn


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 0.95), (0.99, 0.95), (1.0, 1.0), (1.0, 0.0), (1.0, 0.5)])
def test_gae_worked_examples(discount, lam):
    adv, ret = run("gae", [0, 0, 0, 1], [0.2, 0.4, 0.3, 0.6], [1, 1, 1, 1], discount=discount, lambda_=lam)
    tag = f"{discount}.{lam}" if discount != 1 else f"1.0.{lam}"
    np.testing.assert_allclose(adv, golden(f"A6.adv.{tag}"), atol=1e-5)
    np.testing.assert_allclose(ret, golden(f"A6.ret.{tag}"), atol=1e-5)


def test_gae_over_tool_tokens_worked_example():
    """The card loses the .7 that lies on a tool token; the carry rule gives it to the token before."""
    value, mask = [0.1, 0.2, 9, 9, 0.5, 0.6], [1, 1, 0, 0, 1, 1]
    adv, ret = run("gae", [0, 0.1, 0, 0, 0, 1], value, mask, discount=0.99, lambda_=0.95)
    np.testing.assert_allclose(adv, golden("A7.skip.adv"), atol=1e-5)
    np.testing.assert_allclose(ret, golden("A7.skip.ret"), atol=1e-5)
    moved, _ = run("gae", [0, 0.1, 0.7, 0, 0, 1], value, mask, discount=0.99, lambda_=0.95)
    placed, _ = run("gae", [0, 0.8, 0, 0, 0, 1], value, mask, discount=0.99, lambda_=0.95)
    np.testing.assert_allclose(moved, placed, atol=1e-6)
    assert abs(moved[1] - adv[1] - 0.7) < 1e-5


def test_p05_gae_steps_over_observations():
    mask, value = [1, 1, 0, 0, 1], [0.5, 0.4, 9, 9, 0.3]
    adv, ret = run("gae", [0, 0, 0, 0, 1], value, mask, discount=0.9, lambda_=0.8)
    np.testing.assert_allclose(adv, [0.12928, 0.374, 0, 0, 0.7], atol=1e-5)
    np.testing.assert_allclose(ret, [0.62928, 0.774, 0, 0, 1.0], atol=1e-5)
    dirty, _ = run("gae", [0, 0, 0, 0, 1], [0.5, 0.4, np.nan, np.inf, 0.3], mask, discount=0.9, lambda_=0.8)
    np.testing.assert_array_equal(dirty, adv)
    tail, _ = run("gae", [0, 1, 0], [0, 0, 100.0], [1, 1, 0], discount=1.0, lambda_=0.95)
    np.testing.assert_allclose(tail, [0.95, 1, 0], atol=1e-6)
    trailing, _ = run("gae", [0, 0, 1], [0, 0, 100.0], [1, 1, 0], discount=0.5, lambda_=1.0)
    np.testing.assert_allclose(trailing, [0.5, 1, 0], atol=1e-6)


def test_p06_truncation_bootstraps_and_termination_does_not():
    reward, value, mask = [0, 0, 1], [0.5, 0.6, 0.7], [1, 1, 1]
    ended, _ = run("gae", reward, value, mask, discount=0.99, lambda_=0.95)
    np.testing.assert_allclose(ended, [0.44682858, 0.37515, 0.3], atol=1e-6)
    cut, _ = run("gae", reward, value, mask, discount=0.99, lambda_=0.95, bootstrap=0.8)
    np.testing.assert_allclose(cut, [1.14738445, 1.120026, 1.092], atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "index", "want"),
    [
        ([1, 1, 1, 0, 0], 2, [0, 0, 1, 0, 0]),
        ([1, 1, 1, 1, 1], 4, [0, 0, 0, 0, 1]),
        ([1, 1, 0, 0, 0], 3, [0, 1, 0, 0, 0]),
        ([0, 0, 1, 1, 1], 4, [0, 0, 0, 0, 1]),
        ([0, 0, 1, 1, 1], 0, [0, 0, 1, 0, 0]),
    ],
)
def test_p13_rewards_land_on_the_written_token_that_earned_them(mask, index, want):
    reward = np.zeros(5)
    reward[index] = 1.0
    np.testing.assert_array_equal(run("place_reward", reward, mask), want)
    ret = run("discounted_return", reward, mask, discount=0.0)
    np.testing.assert_array_equal(ret, want)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bootstrap", [0.0, 0.7])
def test_estimators_equal_the_oracles(seed, bootstrap):
    reward, value, mask, _ = episode(seed)
    ret = run("discounted_return", reward, mask, discount=0.9, bootstrap=bootstrap)
    np.testing.assert_allclose(ret, oracles.discounted_return(reward, mask, 0.9, bootstrap), atol=1e-5)
    got = run("gae", reward, value, mask, discount=0.9, lambda_=0.8, bootstrap=bootstrap)
    np.testing.assert_allclose(got, oracles.gae(reward, value, mask, 0.9, 0.8, bootstrap), atol=1e-5)
    rng = np.random.default_rng(seed)
    logp, behaviour = rng.normal(size=(2, SIZE))
    options = dict(rho_clip=1.2, bootstrap=bootstrap)
    got = run("vtrace", reward, value, logp, behaviour, mask, discount=0.9, lambda_=0.8, pg_rho_clip=0.9, **options)
    want = oracles.vtrace(reward, value, logp, behaviour, mask, 0.9, 0.8, pg_clip=0.9, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bilevel", [False, True])
def test_turn_gae_equals_the_oracle(seed, bilevel):
    reward, value, mask, turn = episode(seed)
    options = dict(token_discount=0.9, token_lambda=0.7, bootstrap=0.3)
    got = compiled("turn_gae", bilevel=bilevel, discount=0.95, lambda_=0.8, **options)(reward, value, mask, turn)
    want = oracles.turn_gae(reward, value, mask, turn, 0.95, 0.8, bilevel=bilevel, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_turn_gae_worked_examples():
    mask = np.array([1, 1, 0, 0, 1, 1], bool)
    reward, value = [0, 0.1, 0, 0, 0, 1], [0.1, 0.2, 9, 9, 0.5, 0.6]
    turn = np.array([0, 0, 1, 1, 1, 1])
    arrays = (reward, value, mask, turn)
    flat = compiled("turn_gae", discount=0.95, lambda_=0.9)(*arrays)
    np.testing.assert_allclose(flat[0], golden("A8.turnbroadcast"), atol=1e-5)
    both = compiled("turn_gae", discount=0.95, lambda_=0.9, bilevel=True)(*arrays)
    np.testing.assert_allclose(both[0], golden("A8.bilevel"), atol=1e-5)
    ends = run("turn_ends", mask, turn)
    np.testing.assert_array_equal(ends, [0, 1, 0, 0, 0, 1])
    np.testing.assert_allclose(np.asarray(both[0])[ends], golden("A8.turn"), atol=1e-5)
    np.testing.assert_allclose(np.asarray(flat[1])[~ends & mask], [0.1, 0.5], atol=1e-6)
    np.testing.assert_allclose(call(whiten, both[0], mask), golden("A8.bilevel.whiten"), atol=1e-5)


def test_turns_without_reward_are_not_merged():
    value, mask, turn = np.array([0.5, 0.5, 0.5]), np.ones(3, bool), np.array([0, 1, 2])
    adv, _ = run("turn_gae", [0, 0, 1.0], value, mask, turn, discount=0.5, lambda_=0.0)
    np.testing.assert_allclose(adv, [-0.25, -0.25, 0.5])


def test_one_turn_is_plain():
    reward, value, mask, _ = episode(3)
    one = np.zeros(SIZE, int)
    flat = run("turn_gae", reward, value, mask, one, discount=0.9, lambda_=0.8)[0]
    end = int(np.nonzero(mask)[0][-1])
    np.testing.assert_allclose(flat[mask], oracles.place(reward, mask).sum() - value[end], atol=1e-5)
    both = compiled("turn_gae", discount=0.9, lambda_=0.8, token_discount=0.9, bilevel=True)(
        np.eye(SIZE)[end], value, mask, one
    )
    plain = run("gae", np.eye(SIZE)[end], value, mask, discount=0.9, lambda_=0.8)
    np.testing.assert_allclose(both, plain, atol=1e-5)


def test_vtrace_worked_example_and_identities():
    reward, value, rho = [0, 0, 1], [0.3, 0.5, 0.4], np.log([1.5, 0.5, 2])
    adv, target = run("vtrace", reward, value, rho, np.zeros(3), [1, 1, 1], discount=1.0)
    np.testing.assert_allclose(target, golden("A9.vs"), atol=1e-5)
    np.testing.assert_allclose(adv, golden("A9.pg"), atol=1e-5)
    np.testing.assert_allclose(target - np.array(value), golden("A9.err"), atol=1e-5)
    _, on = run("vtrace", reward, value, np.zeros(3), np.zeros(3), [1, 1, 1], discount=0.9, bootstrap=0.5)
    np.testing.assert_allclose(on, run("discounted_return", reward, [1, 1, 1], discount=0.9, bootstrap=0.5), atol=1e-6)


def test_p20_vtrace_is_finite_at_extreme_ratios():
    far = np.array([200.0, -200.0, 0.0])
    out = run("vtrace", np.ones(3), np.ones(3), far, np.zeros(3), np.ones(3), discount=1.0, rho_clip=np.inf)
    assert np.isfinite(out).all()


def test_vapo_worked_example():
    lam = run("length_adaptive_lambda", [10, 20, 40, 400, 8192])
    np.testing.assert_allclose(lam, golden("A10.lambda.clamped"), atol=1e-5)
    assert float(run("length_adaptive_lambda", [0])[0]) == 0.0
    adv, target = run(
        "decoupled_gae", [0, 0, 0, 1], [0.2, 0.4, 0.3, 0.6], [1, 1, 1, 1], discount=1.0, lambda_policy=0.5
    )
    np.testing.assert_allclose(adv, golden("A6.adv.1.0.0.5"), atol=1e-5)
    np.testing.assert_allclose(target, golden("A6.ret.1.0.1.0"), atol=1e-5)


def test_vineppo_worked_example():
    adv = run("step_advantage", [0, 0, 1], [0.4, 0.6, 0.3], [1, 1, 1])
    np.testing.assert_allclose(adv, golden("A11"), atol=1e-5)
    spread = run("spread_turns", adv, [0, 0, 1, 2, -1], [1, 0, 1, 1, 1])
    np.testing.assert_allclose(spread, [0.2, 0, -0.3, 0.7, 0], atol=1e-6)


def test_monte_carlo_values_average_and_fill_from_later_steps():
    value = run("monte_carlo_values", [1.0, 0, 1, 1, 5], [0, 0, 2, 2, 9], 4, bootstrap=0.25)
    np.testing.assert_allclose(value, [0.5, 1.0, 1.0, 0.25])


def test_remax_and_reinforce_plus_plus_worked_examples():
    old = np.array([[-1.0, -0.5, -2.0, -0.7], [-0.3, -1.2, -0.9, -1.5]])
    ref = np.array([[-1.1, -0.4, -1.9, -0.9], [-0.4, -1.1, -1.0, -1.4]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    outcome = np.array([[0, 0, 1.0, 0], [0, 0, 0, 0]])
    reward = call(kl_in_reward, outcome, old, ref, mask, coef=0.1)
    np.testing.assert_allclose(np.where(mask, reward, 0), golden("A2.token_rewards"), atol=1e-6)
    ret = np.stack([run("discounted_return", r, m, discount=1.0) for r, m in zip(reward, mask, strict=True)])
    np.testing.assert_allclose(ret, golden("A2.returns"), atol=1e-6)
    np.testing.assert_allclose(call(whiten, ret, mask), golden("A2.adv"), atol=1e-5)
    np.testing.assert_allclose(call(whiten, ret, mask, ddof=0), golden("A2.adv.ddof0"), atol=1e-5)


def test_identities_of_gae():
    reward, value, mask, _ = episode(7)
    adv, target = run("gae", reward, value, mask, discount=1.0, lambda_=1.0)
    ret = run("discounted_return", reward, mask, discount=1.0)
    np.testing.assert_allclose(adv[mask] + value[mask], ret[mask], atol=1e-5)
    np.testing.assert_allclose(target, ret, atol=1e-5)


def test_nothing_written_gives_zeros():
    out = run("gae", np.ones(4), np.full(4, np.nan), np.zeros(4, bool), discount=0.9, lambda_=0.9, bootstrap=3.0)
    np.testing.assert_array_equal(out, np.zeros((2, 4)))


def test_no_gradient_flows_through_advantages():
    grad = call(jax.grad(lambda v: advantages.gae(v, v, v > 0, discount=1.0, lambda_=1.0)[0].sum()), np.ones(3))
    np.testing.assert_array_equal(grad, np.zeros(3))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_inserting_observations_changes_no_advantage(seed):
    """Compacted and padded at the end, or spread with holes full of garbage: the same numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, SIZE + 1))
    where = np.sort(rng.choice(SIZE, count, replace=False))
    reward, value = rng.normal(size=(2, count)).astype(np.float32)
    turn = np.sort(rng.integers(0, 3, count))
    dense = [np.zeros(SIZE, np.float32), np.full(SIZE, np.nan, np.float32), np.zeros(SIZE, bool), np.full(SIZE, -1)]
    holes = [a.copy() for a in dense]
    holes[1][:] = np.inf
    holes[3][:] = rng.integers(-1, 3, SIZE)
    for target, at in ((dense, np.arange(count)), (holes, where)):
        target[0][at], target[1][at], target[2][at], target[3][at] = reward, value, True, turn
    for name, options, picks in (
        ("discounted_return", dict(discount=0.9, bootstrap=0.4), (0, 2)),
        ("gae", dict(discount=0.9, lambda_=0.8, bootstrap=0.4), (0, 1, 2)),
        ("turn_gae", dict(discount=0.9, lambda_=0.8, bilevel=True), (0, 1, 2, 3)),
        ("turn_gae", dict(discount=0.9, lambda_=0.8), (0, 1, 2, 3)),
    ):
        fn = compiled(name, **options)
        a = np.atleast_2d(fn(*(dense[i] for i in picks)))
        b = np.atleast_2d(fn(*(holes[i] for i in picks)))
        np.testing.assert_allclose(a[:, :count], b[:, where], atol=2e-6)
        assert not b[:, ~holes[2]].any()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE), st.integers(0, SIZE - 1))
def test_no_reward_is_lost(bits, at):
    mask = np.array(bits)
    reward = np.zeros(SIZE, np.float32)
    reward[at] = 3.0
    placed = np.asarray(compiled("place_reward")(reward, mask))
    assert placed.sum() == (3.0 if mask.any() else 0.0)
    assert not placed[~mask].any()
    ret = np.asarray(compiled("discounted_return", discount=1.0)(reward, mask))
    if mask.any():
        assert ret[np.argmax(mask)] == 3.0


def test_rows_laid_end_to_end_equal_the_unsplit_episode():
    reward, value, mask, _ = episode(9)
    whole = run("gae", reward, value, mask, discount=0.9, lambda_=0.8, bootstrap=0.5)
    gap = np.zeros(3)
    split = [np.concatenate([a[:4], gap.astype(a.dtype), a[4:]]) for a in (reward, value, mask)]
    parts = run("gae", *split, discount=0.9, lambda_=0.8, bootstrap=0.5)
    np.testing.assert_allclose(np.delete(parts, [4, 5, 6], axis=1), whole, atol=1e-6)
