import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import statistics

golden = oracles.golden


def test_remax_worked_example():
    adv = call(statistics.remax, np.array([1.0, 0.0]), np.array([0.4, 0.4]))
    np.testing.assert_allclose(adv, golden("A5.tok")[:, 0], atol=1e-6)


def test_kl_in_reward_keeps_rewards_of_other_tokens():
    mask = np.array([1, 0], bool)
    got = call(
        statistics.kl_in_reward, np.array([1.0, 2.0]), np.array([-1.0, np.nan]), np.array([-2.0, 0.0]), mask, coef=0.1
    )
    np.testing.assert_allclose(got, [0.9, 2.0], atol=1e-6)


def test_adaptive_kl_worked_example():
    got = [float(call(statistics.adaptive_kl, np.float32(0.1), np.float32(x), target=0.02)) for x in (0.03, 0.005)]
    np.testing.assert_allclose(got, golden("B16.adkl"), atol=1e-6)


def test_adaptive_entropy_acts_only_below_the_target():
    below = call(statistics.adaptive_entropy, np.float32(0.01), np.float32(0.1), target=0.2)
    np.testing.assert_allclose(below, [0.015, 0.015], atol=1e-7)
    above = call(statistics.adaptive_entropy, np.float32(0.002), np.float32(0.3), target=0.2)
    np.testing.assert_allclose(above, [0.0, 0.0])


def test_role_baseline_worked_example():
    baseline, got = np.zeros(2), []
    for ret in (1.0, -1.0, 1.0):
        baseline, adv = call(statistics.role_baseline, baseline, np.array([ret]), np.array([1]))
        got.append(adv[0])
    np.testing.assert_allclose(got, golden("D.spiral.subtractfirst"), atol=1e-6)
    assert baseline[0] == 0.0


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(5)))
def test_role_baselines_do_not_depend_on_the_order_of_a_batch(order):
    ret, role, order = np.array([1.0, -1, 0.5, 2, 3]), np.array([0, 1, 0, 1, 7]), list(order)
    start = np.array([0.2, -0.3])
    baseline, adv = call(statistics.role_baseline, start, ret, role)
    again, permuted = call(statistics.role_baseline, start, ret[order], role[order])
    np.testing.assert_allclose(again, baseline, atol=1e-6)
    np.testing.assert_allclose(permuted, adv[order], atol=1e-6)
    np.testing.assert_allclose(adv, [0.8, -0.7, 0.3, 2.3, 0.0], atol=1e-6)
    np.testing.assert_allclose(baseline, 0.95**2 * start + (1 - 0.95**2) * np.array([0.75, 0.5]), atol=1e-6)


def test_running_statistics_equal_those_of_all_data():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3, 2, (4, 10)), rng.random((4, 10)) < 0.7
    mask[2] = False
    seen = statistics.running_init()
    for row, keep in zip(np.where(mask, x, np.nan), mask, strict=True):
        seen = call(statistics.running_update, seen, row, keep)
    kept = x[mask]
    np.testing.assert_allclose(seen, [kept.size, kept.mean(), kept.var() * kept.size], rtol=1e-5)
    scaled = call(statistics.running_scale, seen, kept)
    np.testing.assert_allclose(scaled, kept / kept.std(), rtol=1e-4)
    centred = call(statistics.running_scale, seen, kept, shift=True)
    assert centred.mean() == pytest.approx(0.0, abs=1e-4)


def test_running_scale_of_nothing_or_equal_values_is_the_identity():
    seen = statistics.running_init()
    np.testing.assert_array_equal(call(statistics.running_scale, seen, np.array([2.0, 3.0])), [2.0, 3.0])
    seen = call(statistics.running_update, seen, np.full(4, 5.0))
    np.testing.assert_array_equal(call(statistics.running_scale, seen, np.array([2.0, 3.0])), [2.0, 3.0])


# Float32 rounds the mean of so many of these values away from them.
ROUNDED = [(0.1, 7), (0.3, 13), (1 / 3, 11), (0.7, 24), (-0.1, 7), (1000.1, 7)]


@pytest.mark.parametrize("value, n", ROUNDED)
def test_equal_values_do_not_differ_by_the_rounding_of_their_mean(value, n):
    equal, other = np.full(n, value, np.float32), np.array([2.0, -3.0], np.float32)
    seen = statistics.running_init()
    for mask in (np.ones(n, bool), np.arange(n) < n - 1, np.zeros(n, bool)):
        seen = call(statistics.running_update, seen, np.where(mask, equal, np.nan), mask)
        assert seen.squares == 0 and seen.mean == np.float32(value)
        for ddof in (0, 1):
            np.testing.assert_array_equal(call(statistics.running_scale, seen, other, ddof=ddof), other)
        np.testing.assert_array_equal(call(statistics.running_scale, seen, equal, shift=True), 0)
    # Sums in another order are no difference, and what differs in the fourth digit is one.
    near = np.nextafter(equal, np.float32(np.inf) * (np.arange(n) % 2 * 2 - 1).astype(np.float32))
    seen = call(statistics.running_update, statistics.running_init(), near)
    assert seen.squares > 0
    np.testing.assert_array_equal(call(statistics.running_scale, seen, other), other)
    far = equal * (1 + 1e-4 * np.arange(n, dtype=np.float32))
    seen = call(statistics.running_update, statistics.running_init(), far)
    scaled = call(statistics.running_scale, seen, far)
    np.testing.assert_allclose(scaled, far / (np.std(far.astype(np.float64)) + 1e-8), rtol=2e-3)
