"""Statistics and controllers that live between steps, and rewards made of log-probabilities.

All are pure: state in, state out. Sums over a batch do not depend on the batch's order. Nothing carries gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.checks import check_above
from agentrl_jax.kl import kl
from agentrl_jax.masked import as_float, fill, masked_count, masked_mean
from agentrl_jax.types import Array


def kl_in_reward(
    reward: Array,
    logp_old: Array,
    logp_ref: Array,
    mask: Array,
    *,
    coef: Array | float,
    estimator: str = "k1",
) -> Array:
    """``reward - coef * kl(logp_old, logp_ref)`` on written tokens; other tokens keep their reward. Any shape.

    With k1 the expected gradient is exactly that of the KL penalty; k2 and k3 are biased here. With whitened returns to
    go it makes REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): ``whiten(discounted_return(...), mask)``.
    """
    penalty = jax.lax.stop_gradient(kl(logp_old, logp_ref, estimator=estimator, mask=mask))
    return as_float(reward) - coef * fill(penalty, mask)


def remax(ret: Array, greedy_ret: Array) -> Array:
    """ReMax: ``R - R_greedy``, any shape; the greedy roll starts from the same task.

    Source: Li et al., ReMax, 2023, arXiv 2310.10505. The official code adds a per-token KL to a token's own return
    only.
    """
    return jax.lax.stop_gradient(as_float(ret) - as_float(greedy_ret))


def role_baseline(
    baseline: Array, ret: Array, role: Array, *, decay: Array | float = 0.95, where: Array | None = None
) -> tuple[Array, Array]:
    """Role-conditioned advantages: ``A_i = R_i - b[role_i]`` and the updated baselines, ``([R], [N])``.

    All members are measured by the old baseline, then ``b <- decay^n b + (1 - decay^n) mean(R)`` with the ``n``
    returns of
    the role: for one return at a time the code's rule (``b <- .95 b + .05 R``, subtract first), and independent of a
    batch's order, which the code's is not. A role outside ``[0, R)`` gets 0. Start from zeros.

    A function alone, and no part that ``compose`` knows: the rollout plays one seat, and no environment has several,
    so every role would be 0 and the baseline ``credit.returns`` has it already.

    Source: Liu et al., SPIRAL, 2025, arXiv 2506.24119 (there a baseline per game and role: number them jointly).
    """
    roles = baseline.shape[0]
    counts = (role >= 0) & (role < roles)
    if where is not None:
        counts = counts & where.astype(bool)
    role = jnp.where(counts, role, 0)
    n = jax.ops.segment_sum(counts.astype(jnp.float32), role, roles)
    mean = jax.ops.segment_sum(fill(ret, counts), role, roles) / jnp.maximum(n, 1.0)
    keep = jnp.power(jnp.asarray(decay, jnp.float32), n)
    adv = fill(fill(ret, counts) - baseline[role], counts)
    return jax.lax.stop_gradient((keep * baseline + (1.0 - keep) * mean, adv))


def adaptive_kl(
    coef: Array,
    observed: Array,
    *,
    target: Array | float,
    horizon: Array | float = 1e4,
    count: Array | float = 256.0,
    limit: Array | float = 0.2,
) -> Array:
    """``coef * (1 + clip(observed / target - 1, -limit, limit) * count / horizon)``: the next KL coefficient, scalar.

    ``count`` is the number of episodes in the step. Source: Ziegler et al., 2019, arXiv 1909.08593.
    """
    check_above(0.0, target=target, horizon=horizon)
    return jax.lax.stop_gradient(coef * (1.0 + jnp.clip(observed / target - 1.0, -limit, limit) * count / horizon))


def adaptive_entropy(
    coef: Array, observed: Array, *, target: Array | float, step: Array | float = 0.005
) -> tuple[Array, Array]:
    """The next entropy coefficient, and the one to apply now: ``(scalar, scalar)``.

    Up by ``step`` while the entropy is at most ``target``, down otherwise and not below 0; applied only while the
    entropy is at most ``target``. Source: Skywork-OR1, He et al., 2025, arXiv 2505.22312, as in TRL; the floor is
    ours.
    """
    short = observed <= target
    coef = jnp.maximum(jnp.where(short, coef + step, coef - step), 0.0)
    return jax.lax.stop_gradient((coef, jnp.where(short, coef, 0.0)))


EQUAL = 1e-6
"""Deviations up to this share of the mean are the rounding of float32, and no difference."""


class Running(NamedTuple):
    """Count, mean and sum of squared deviations of everything seen so far: ``float32[]`` each."""

    count: Array
    mean: Array
    squares: Array


def running_init() -> Running:
    """Nothing seen yet."""
    zero = jnp.zeros((), jnp.float32)
    return Running(zero, zero, zero)


def running_update(seen: Running, x: Array, mask: Array | None = None) -> Running:
    """Takes in a batch of values (those in ``mask``): exactly the statistics of the joined data, in any order.

    Equal values have that value for their mean and exactly 0 for ``squares``, over any number of batches.
    Source: Chan, Golub and LeVeque, 1983 (parallel variance).
    """
    mask = jnp.ones(jnp.shape(x), bool) if mask is None else jnp.asarray(mask).astype(bool)
    # Measured from the lowest: a mean of equal values, rounded, would leave squares of its error.
    low = jnp.min(fill(x, mask, jnp.inf))
    low = jnp.where(jnp.isfinite(low), low, 0.0)
    above = fill(fill(x, mask) - low, mask)
    n, lift = masked_count(mask), masked_mean(above, mask)
    mean, squares = low + lift, jnp.sum(fill(above - lift, mask) ** 2)
    total = jnp.maximum(seen.count + n, 1.0)
    gap = jnp.where(n > 0, mean - seen.mean, 0.0)
    new = Running(
        seen.count + n,
        seen.mean + gap * n / total,
        seen.squares + squares + gap**2 * seen.count * n / total,
    )
    return jax.lax.stop_gradient(new)


def running_scale(seen: Running, x: Array, *, ddof: float = 0, eps: float = 1e-8, shift: bool = False) -> Array:
    """``x / (std + eps)``, or ``(x - mean) / (std + eps)`` with ``shift``, by the running statistics; any shape.

    The division is left out while nothing, or only equal values, have been seen: while the deviation is at most 1e-6 of
    the mean, which is what float32 makes of sums that differ in their order alone.
    """
    std = jnp.sqrt(seen.squares / jnp.maximum(seen.count - ddof, 1.0))
    x = as_float(x) - seen.mean if shift else as_float(x)
    return x / jnp.where(std > EQUAL * jnp.abs(seen.mean), std + eps, 1.0)
