"""Objectives: scores and a weighed batch to one additive scalar, out of the unreduced losses."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax import losses, masked, preference
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.checks import check_choice
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.kl import kl as kl_divergence
from agentrl_jax.types import Array, Batch, Metrics, Score

Objective = Callable[[dict[str, Score], Batch, dict[str, Array]], tuple[Array, Metrics]]
Surrogate = Callable[[Score, Batch, dict[str, Array]], Array]


def weigh_tokens(mode: str, *, norm: float | None = None) -> Callable[[Batch, dict[str, Array], int], Batch]:
    """``Algorithm.weigh``: aggregation weights of the minibatch by a mode of ``masked.aggregation_weights``.

    A sequence is an episode: where contexts restart, its ``segments`` consecutive rows count as one.

    Raises:
      ValueError: see ``masked.check_mode``.
    """
    masked.check_mode(mode, norm)

    def weigh(batch: Batch, hyper: dict[str, Array], segments: int) -> Batch:
        del hyper
        whole = batch.mask.reshape(-1, segments * batch.mask.shape[-1])
        weight = masked.aggregation_weights(whole, mode, norm=norm)
        return batch._replace(weight=weight.reshape(batch.mask.shape))

    return weigh


def weigh_pairs(batch: Batch, hyper: dict[str, Array], segments: int) -> Batch:
    """``Algorithm.weigh`` of pairs: ``1 / (pairs kept in the minibatch)`` on the tokens of a kept pair."""
    del hyper, segments
    axes = tuple(range(1, batch.mask.ndim))
    kept = jnp.any(batch.mask, axis=axes, keepdims=True)
    return batch._replace(weight=jnp.where(batch.mask, 1.0 / jnp.maximum(jnp.sum(kept), 1), 0.0))


def weighted(batch: Batch, x: Array) -> Array:
    """``sum(weight * x)`` over the loss tokens; masked slots are not read."""
    return jnp.sum(batch.weight * jnp.where(batch.mask, x, 0.0))


def policy_gradient(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    """``-A log pi`` per token."""
    del hyper
    return losses.policy_gradient(score.logp, batch.adv, mask=batch.mask)


def ppo_clip(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    """PPO's clipped surrogate per token, with ``eps_low`` and ``eps_high``."""
    return losses.ppo_clip(
        score.logp, batch.logp_old, batch.adv, eps_low=hyper["eps_low"], eps_high=hyper["eps_high"], mask=batch.mask
    )


def likelihood(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    """``-log pi`` per token: supervised learning."""
    del hyper
    return losses.policy_gradient(score.logp, jnp.ones_like(score.logp), mask=batch.mask)


def token_objective(surrogate: Surrogate, *, kl: str | None = None, critic: bool = False) -> Objective:
    """``sum w (surrogate + kl_coef * kl - entropy_coef * H) + value_coef * sum w * value loss``.

    Args:
      surrogate: per-token policy loss.
      kl: estimator against ``extra["logp_ref"]`` (``kl.ESTIMATORS``), or None for no such term.
      critic: whether the value head is trained, with clipping at ``hyper["value_eps"]``.

    Raises:
      ValueError: an unknown estimator.
    """
    if kl is not None:
        check_choice("kl", kl, ESTIMATORS)

    def objective(scores: dict[str, Score], batch: Batch, hyper: dict[str, Array]) -> tuple[Array, Metrics]:
        score = scores["policy"]
        x = surrogate(score, batch, hyper)
        metrics = diagnostics(score, batch, hyper)
        if "entropy_coef" in hyper:
            x = x - hyper["entropy_coef"] * score.entropy
        if kl is not None:
            penalty = kl_divergence(score.logp, batch.extra["logp_ref"], estimator=kl, mask=batch.mask)
            x = x + hyper["kl_coef"] * penalty
            metrics["kl"] = metrics_lib.masked(jax.lax.stop_gradient(penalty), batch.mask)
        if critic:
            error = losses.value_clip(score.value, batch.value, batch.target, eps=hyper["value_eps"], mask=batch.mask)
            x = x + hyper["value_coef"] * error
            metrics["value_loss"] = metrics_lib.masked(jax.lax.stop_gradient(error), batch.mask)
        return weighted(batch, x), metrics

    return objective


def diagnostics(score: Score, batch: Batch, hyper: dict[str, Array]) -> Metrics:
    """Entropy, clip fractions, old-to-new KL, and ``max_logp_gap``: how far scoring before the first update was from
    sampling."""
    logp, mask = jax.lax.stop_gradient(score.logp), batch.mask
    sampled = mask & ~batch.traj.expert
    ratio = jnp.exp(jnp.clip(jnp.where(mask, logp - batch.logp_old, 0.0), -20.0, 20.0))
    gap = jnp.where(sampled, jnp.abs(batch.logp_old - batch.traj.logp), 0.0)
    out = {
        "entropy": metrics_lib.masked(jax.lax.stop_gradient(score.entropy), mask),
        "kl_old": metrics_lib.masked(ratio - 1.0 - jnp.log(ratio), mask),
        "max_logp_gap": (jnp.max(gap), jnp.ones(())),
    }
    if "eps_low" in hyper:
        high = (ratio > 1.0 + hyper["eps_high"]) & (batch.adv > 0)
        low = (ratio < 1.0 - hyper["eps_low"]) & (batch.adv < 0)
        out["clip_high"] = metrics_lib.masked(high.astype(jnp.float32), mask)
        out["clip_low"] = metrics_lib.masked(low.astype(jnp.float32), mask)
    return out


def preference_objective(scores: dict[str, Score], batch: Batch, hyper: dict[str, Array]) -> tuple[Array, Metrics]:
    """DPO on pairs of trajectories, ``[P, 2, segments, T]``, observation tokens masked.

    ``-log sigmoid(beta * h)`` with ``h`` the difference of summed log-ratios to the reference over the agent's own
    tokens. The environment's terms cancel between policy and reference, since both see the same observations; the
    partition functions of later states do not (DMPO's point, Shi et al., 2024, arXiv 2406.14868). Source: Rafailov
    et al., 2023, arXiv 2305.18290.
    """
    score, axes = scores["policy"], (2, 3)
    total = lambda x: jnp.sum(jnp.where(batch.mask, x, 0.0), axis=axes)  # noqa: E731
    logp, ref = total(score.logp), total(batch.extra["logp_ref"])
    loss = preference.dpo(
        logp[:, 0], logp[:, 1], ref[:, 0], ref[:, 1], beta=hyper["beta"], label_smoothing=hyper["label_smoothing"]
    )
    # A pair's weight stands on each of its tokens.
    weight = jnp.max(batch.weight, axis=(1, 2, 3))
    kept = weight > 0
    gap = jax.lax.stop_gradient((logp - ref)[:, 0] - (logp - ref)[:, 1])
    metrics = diagnostics(score, batch, hyper)
    metrics["margin"] = metrics_lib.masked(gap, kept)
    metrics["preference_accuracy"] = metrics_lib.masked((gap > 0).astype(jnp.float32), kept)
    return jnp.sum(jnp.where(kept, weight * loss, 0.0)), metrics
