"""Numbers with their uncertainty, on the host: success intervals, pass@k, interquartile mean, bootstrap.

Seeds and problems are the units that are drawn again; samples of one problem are not independent problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Statistic = Callable[..., np.ndarray]
"""``(x, axis=...) -> array``: ``np.mean``, ``np.median``, ``iqm``."""


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    estimate: float
    low: float
    high: float


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a success rate.

    ``(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)``; it never leaves ``[0, 1]`` and has a width at 0 and
    at ``trials`` successes (Wilson, 1927; Brown, Cai and DasGupta, 2001).

    Raises:
      ValueError: no trials, successes outside ``[0, trials]``, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: expected at least 1 trial and 0 to all successes")
    return _wilson(successes / trials, int(trials), confidence)


def pass_at_k(trials: ArrayLike, successes: ArrayLike, k: int) -> np.ndarray:
    """Unbiased probability that at least one of ``k`` samples of a problem succeeds: ``1 - C(n-c, k) / C(n, k)``.

    Computed as ``1 - prod_{i=n-c+1..n} (1 - k/i)``, which stays exact where the binomials overflow (Chen et al., 2021,
    arXiv:2107.03374). ``1 - (1 - c/n)^k`` is biased.

    Args:
      trials: ``n``, samples of each problem, ``[P]`` or a scalar.
      successes: ``c``, the same shape.
      k: at least 1.

    Returns:
      float64 in the broadcast shape; average it over problems.

    Raises:
      ValueError: ``k`` is below 1 or above some ``n``, or some ``c`` is outside ``[0, n]``.
    """
    n, c = np.broadcast_arrays(np.asarray(trials, np.int64), np.asarray(successes, np.int64))
    if k < 1 or np.any(n < k):
        raise ValueError(
            f"pass@{k} needs k >= 1 and at least k samples of every problem; the fewest are {n.min(initial=k)}"
        )
    if np.any((c < 0) | (c > n)):
        raise ValueError("successes must lie between 0 and the number of samples of their problem")
    return np.vectorize(_pass_at_k, otypes=[np.float64])(n, c, k)


def pass_at_k_interval(
    trials: ArrayLike, successes: ArrayLike, k: int, *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean pass@k over problems, with a percentile bootstrap interval that draws problems again.

    For ``k=1``, and where every problem has the same value, so that drawing again would show no uncertainty, Wilson's
    interval of the mean over that many problems: no value in [0, 1] spreads more than a success or failure does.

    Raises:
      ValueError: as ``pass_at_k``, or there is no problem.
    """
    x = np.atleast_1d(pass_at_k(trials, successes, k))
    if x.size and (k == 1 or np.all(x == x[0])):
        _check_confidence(confidence)
        return _wilson(float(np.mean(x)), x.size, confidence)
    return bootstrap(x, np.mean, confidence=confidence, seed=seed)


def iqm(x: ArrayLike, axis: int | None = None) -> np.ndarray:
    """Interquartile mean: the mean of the middle half, a quarter cut off at each end.

    Agarwal et al., 2021, arXiv:2108.13264.

    Raises:
      ValueError: there are no values.
    """
    from scipy.stats import trim_mean

    x = np.asarray(x, np.float64)
    if x.size == 0:
        raise ValueError("the interquartile mean of no values is not defined")
    return trim_mean(x.ravel() if axis is None else x, 0.25, axis=axis or 0)


def bootstrap(
    x: ArrayLike,
    statistic: Statistic = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a statistic of ``x [S]`` (a value a seed, or a problem).

    A single value, or equal ones, give an interval of width 0, which says nothing of the uncertainty.

    Raises:
      ValueError: no values, values that are not finite, or a confidence outside (0, 1).
    """
    x = np.asarray(x, np.float64)
    if x.ndim != 1:
        raise ValueError(f"expected one value a seed, found shape {x.shape}")
    estimate, low, high = bootstrap_band(x[:, None], statistic, confidence=confidence, resamples=resamples, seed=seed)
    return Interval(float(estimate[0]), float(low[0]), float(high[0]))


def bootstrap_band(
    x: ArrayLike,
    statistic: Statistic = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimate and percentile bootstrap interval at every step of ``x [S, steps]``, seeds drawn again whole.

    Raises:
      ValueError: no seeds, values that are not finite, or a confidence outside (0, 1).
    """
    from scipy.stats import bootstrap as resample

    _check_confidence(confidence)
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(f"expected [seeds, steps] with at least one seed, found shape {x.shape}")
    if not np.all(np.isfinite(x)):
        raise ValueError("values must be finite: decide what a missing one means before averaging")
    estimate = np.asarray(statistic(x, axis=0), np.float64)
    if x.shape[0] == 1 or x.shape[1] == 0:  # Nothing can be drawn again.
        return estimate, estimate, estimate
    found = resample(
        (x,),
        statistic,
        axis=0,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        vectorized=True,
        batch=max(1, 2_000_000 // x.size),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return estimate, np.asarray(found.low), np.asarray(found.high)


def probability_of_improvement(
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """``P(X > Y) + P(X = Y) / 2`` over pairs of seeds, with a bootstrap interval.

    Agarwal et al., 2021, arXiv:2108.13264.

    Args:
      x: a value a seed of the one method, ``[S]``.
      y: of the other, ``[R]``; drawn again independently.

    Raises:
      ValueError: no values, or values that are not finite.
    """
    _check_confidence(confidence)
    first, second = np.asarray(x, np.float64), np.asarray(y, np.float64)
    for values in (first, second):
        if values.ndim != 1 or values.size == 0 or not np.all(np.isfinite(values)):
            raise ValueError("expected at least one finite value a method")
    random = np.random.default_rng(seed)
    wins = (np.sign(first[:, None] - second[None, :]) + 1) / 2
    rows = random.integers(0, first.size, (resamples, first.size))
    columns = random.integers(0, second.size, (resamples, second.size))
    drawn = np.array([wins[np.ix_(row, column)].mean() for row, column in zip(rows, columns, strict=True)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(float(wins.mean()), float(low), float(high))


def _wilson(rate: float, trials: int, confidence: float) -> Interval:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle, scale = rate + z**2 / (2 * trials), 1 + z**2 / trials
    half = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    low = 0.0 if rate == 0 else (middle - half) / scale  # Rounding would leave a residue.
    return Interval(rate, low, 1.0 if rate == 1 else (middle + half) / scale)


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed is anything between 0 and 1")
