"""Intervals and unbiased estimators against published numbers, exact enumeration, and coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.intervals import (
    bootstrap,
    bootstrap_band,
    iqm,
    pass_at_k,
    pass_at_k_interval,
    probability_of_improvement,
    wilson,
)


def test_wilson_golden():
    estimate, low, high = wilson(8, 10)
    assert estimate == 0.8
    assert (low, high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 20)[1] == pytest.approx(0, abs=1e-12)
    assert wilson(0, 20)[2] == pytest.approx(0.161125, abs=1e-6)
    assert wilson(20, 20)[1] == pytest.approx(1 - 0.161125, abs=1e-6)
    assert wilson(80, 100, confidence=0.9)[2] < wilson(80, 100)[2]
    for successes, trials in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="expected at least 1 trial"):
            wilson(successes, trials)
    with pytest.raises(ValueError, match="confidence is 95"):
        wilson(1, 2, confidence=95)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 4, 1.0),
        (4, 1, 2, 0.5),
        (4, 1, 1, 0.25),
        (10, 3, 1, 0.3),
        (10, 3, 5, 0.91666667),
        (200, 5, 100, 0.97030839),
        (5, 5, 1, 1.0),
        (5, 0, 5, 0.0),
    ],
)
def test_pass_at_k_golden(n, c, k, expected):
    """P55: the unbiased estimator, not the plug-in one."""
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 0, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match=r"pass@|successes must lie"):
        pass_at_k(n, c, k)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    share = sum(min(subset) < c for subset in subsets) / len(subsets)
    assert float(pass_at_k(n, c, k)) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_large_counts_stay_exact():
    exact = 1 - math.comb(9900, 500) / math.comb(10000, 500)
    assert float(pass_at_k(10000, 100, 500)) == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_averages_over_problems():
    """P55: a problem with many samples counts as much as one with few."""
    estimate, low, high = pass_at_k_interval([2, 100], [2, 0], 1)
    assert estimate == 0.5  # Pooled samples would give 2/102.
    assert 0 <= low <= estimate <= high <= 1
    assert pass_at_k_interval([8] * 30, [4] * 30, 2) == pass_at_k_interval([8] * 30, [4] * 30, 2)
    with pytest.raises(ValueError, match="at least one seed"):
        pass_at_k_interval([], [], 1)


def test_pass_at_k_of_equal_problems_still_has_a_width():
    """All or none solved: the bootstrap alone would give [1, 1] and [0, 0]."""
    for k in (1, 2, 4):
        assert pass_at_k_interval([4] * 20, [4] * 20, k) == wilson(20, 20)
        assert pass_at_k_interval([4] * 20, [0] * 20, k) == wilson(0, 20)
        assert pass_at_k_interval(4, 4, k) == wilson(1, 1)
    assert pass_at_k_interval([2] * 20, [1] * 20, 1) == wilson(10, 20)
    nearly = pass_at_k_interval([4] * 20, [4] * 19 + [3], 1)
    assert wilson(19, 20).low < nearly.low < nearly.estimate == 0.9875 < nearly.high < 1


def test_iqm():
    assert iqm([0, 1, 2, 3, 4, 5, 6, 1000]) == pytest.approx(3.5)
    x = np.arange(24.0).reshape(8, 3)
    np.testing.assert_allclose(iqm(x, axis=0), x[2:6].mean(0))
    with pytest.raises(ValueError, match="not defined"):
        iqm([])


def test_bootstrap_covers_the_truth():
    random = np.random.default_rng(1)
    inside = 0
    for trial in range(100):
        estimate, low, high = bootstrap(random.normal(3.0, 1.0, 30), seed=trial, resamples=300)
        assert low <= estimate <= high
        inside += low <= 3.0 <= high
    assert 86 <= inside <= 99  # A percentile bootstrap of 30 values covers a little less than 95 %.


def test_bootstrap_band_equals_bootstrap_per_step():
    x = np.random.default_rng(0).normal(size=(9, 4))
    band = np.stack(bootstrap_band(x, iqm, seed=3))
    assert band.shape == (3, 4)
    assert np.all(band[1] <= band[0]) and np.all(band[0] <= band[2])
    np.testing.assert_array_equal(band[:, 0], bootstrap(x[:, 0], iqm, seed=3))
    flat = bootstrap_band(np.ones((1, 4)))
    np.testing.assert_array_equal(flat, np.ones((3, 4)))
    assert bootstrap([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_bootstrap_refuses():
    with pytest.raises(ValueError, match="one value a seed"):
        bootstrap(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="must be finite"):
        bootstrap([1.0, float("nan")])
    with pytest.raises(ValueError, match="at least one seed"):
        bootstrap_band(np.zeros((0, 3)))


def test_probability_of_improvement():
    assert probability_of_improvement([2, 3], [0, 1]) == (1.0, 1.0, 1.0)
    assert probability_of_improvement([1, 1], [1]) == (0.5, 0.5, 0.5)
    estimate, low, high = probability_of_improvement([1, 4, 6], [2, 3, 5])
    assert estimate == pytest.approx(5 / 9)
    assert low < estimate < high
    mirrored = probability_of_improvement([2, 3, 5], [1, 4, 6])
    assert mirrored.estimate == pytest.approx(1 - estimate)
    with pytest.raises(ValueError, match="at least one finite value"):
        probability_of_improvement([], [1])
