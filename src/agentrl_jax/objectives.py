"""Objectives: scores and a weighed batch to one additive scalar, out of the unreduced losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import importance, losses, masked, preference
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.checks import check_choice
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.kl import kl as kl_divergence
from agentrl_jax.surrogates import Imitation, Surrogate
from agentrl_jax.types import Array, Batch, Metrics, Score

Objective = Callable[[dict[str, Score], Batch, dict[str, Array]], tuple[Array, Metrics]]


def weigh_tokens(
    mode: str, *, norm: float | None = None, imitation: Imitation | None = None
) -> Callable[[Batch, dict[str, Array], int], Batch]:
    """``Algorithm.weigh``: aggregation weights of the minibatch by a mode of ``masked.aggregation_weights``.

    A sequence is an episode: where contexts restart, its ``segments`` consecutive rows count as one. An ``imitation``
    that is mixed in has the expert's tokens averaged by themselves; one that is added gets weights of its own,
    ``extra["imitation_weight"]``, over the tokens of ``extra["correct"]``.

    Raises:
      ValueError: see ``masked.check_mode``.
    """
    masked.check_mode(mode, norm)
    kind = None if imitation is None else imitation.kind

    def weights(mask: Array, mode: str, segments: int, norm: float | None = None) -> Array:
        whole = mask.reshape(-1, segments * mask.shape[-1])
        return masked.aggregation_weights(whole, mode, norm=norm).reshape(mask.shape)

    def weigh(batch: Batch, hyper: dict[str, Array], segments: int) -> Batch:
        del hyper
        own = batch.mask & ~batch.traj.expert if kind == "mix" else batch.mask
        weight = weights(own, mode, segments, norm)
        if "value_mask" in batch.extra:
            # Fewer tokens train the critic: they have denominators of their own.
            value = weights(batch.mask & batch.extra["value_mask"], mode, segments, norm)
            batch = batch._replace(extra={**batch.extra, "value_weight": value})
        if kind == "mix":
            weight = weight + weights(batch.mask & batch.traj.expert, "token-mean", segments)
        if kind == "add":
            right = weights(batch.mask & batch.extra["correct"], "token-mean", segments)
            batch = batch._replace(extra={**batch.extra, "imitation_weight": right})
        return batch._replace(weight=weight)

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


def token_objective(
    surrogate: Surrogate,
    *,
    kl: str | None = None,
    critic: bool = False,
    imitation: Imitation | None = None,
    perception: bool = False,
    clips: bool = True,
    kl_corrected: bool = False,
    offpolicy: bool = False,
) -> Objective:
    """``sum w (importance * surrogate + kl_coef * kl - entropy_coef * H) + value_coef * sum w * value loss``, and more
    where asked for.

    ``importance`` is ``extra["importance"]`` where a stage put it there: it re-weighs the policy's term alone, and
    stays out of the denominators.

    Args:
      surrogate: per-token policy loss.
      kl: estimator against ``extra["logp_ref"]`` (``kl.ESTIMATORS``), or None for no such term.
      critic: whether the value head is trained, with clipping at ``hyper["value_eps"]``; on ``extra["value_mask"]``
        alone where a stage put it there.
      imitation: a term on expert tokens or correct episodes; ``weigh_tokens`` must know of it too.
      clips: whether ``eps_low`` and ``eps_high`` bound the ratio of a token, so that ``clip_low`` and ``clip_high`` say
        how often.
      perception: PAPO's ``- perception_coef * min(k3, perception_max)`` against ``extra["logp_masked"]``.
      kl_corrected: whether the divergence is multiplied by ``pi / pi_old`` (``kl.kl`` with ``logp_old``).
      offpolicy: whether rows with a negative advantage that have drifted more than ``hyper["offpolicy_delta"]`` from
        what was sampled lose the policy's term (``importance.offpolicy_keep``); they stay in the denominators.

    Raises:
      ValueError: an unknown estimator.
    """
    if kl is not None:
        check_choice("kl", kl, ESTIMATORS)

    def objective(scores: dict[str, Score], batch: Batch, hyper: dict[str, Array]) -> tuple[Array, Metrics]:
        score = scores["policy"]
        x = surrogate(score, batch, hyper)
        # These are of the policy's own words; those of the expert were not drawn from it.
        own = ~batch.traj.expert if imitation is not None and imitation.expert else True
        told = batch.mask if own is True else batch.mask & own
        metrics = diagnostics(score, batch, hyper if clips else {}, told)
        if "importance" in batch.extra:
            x = x * batch.extra["importance"]
        if offpolicy:
            x = _near(x, score, batch, hyper, metrics)
        if imitation is not None:
            x = _imitate(imitation, x, score, batch, hyper, metrics)
        if "entropy_coef" in hyper:
            x = x - hyper["entropy_coef"] * jnp.where(own, score.entropy, 0.0)
        if kl is not None:
            old = batch.logp_old if kl_corrected else None
            penalty = kl_divergence(score.logp, batch.extra["logp_ref"], estimator=kl, mask=batch.mask, logp_old=old)
            x = x + hyper["kl_coef"] * jnp.where(own, penalty, 0.0)
            metrics["kl"] = metrics_lib.masked(jax.lax.stop_gradient(penalty), told)
        if perception:
            x = x - hyper["perception_coef"] * jnp.where(own, _perception(score, batch, hyper, told, metrics), 0.0)
        error = _value_error(score, batch, hyper, metrics) if critic else jnp.zeros_like(x)
        if critic and "value_weight" not in batch.extra:
            x = x + hyper["value_coef"] * error
        total = weighted(batch, x)
        if "value_weight" in batch.extra:
            apart = jnp.sum(batch.extra["value_weight"] * jnp.where(batch.mask, error, 0.0))
            total = total + hyper["value_coef"] * apart
        if imitation is not None and imitation.kind == "add":
            right = jnp.where(batch.mask, imitation.loss(score, batch, hyper), 0.0)
            total = total + hyper["nll_coef"] * jnp.sum(batch.extra["imitation_weight"] * right)
        return total, metrics

    return objective


def _near(x: Array, score: Score, batch: Batch, hyper: dict[str, Array], metrics: Metrics) -> Array:
    """The per-token loss without that of sequences that off-policy masking silences; the sampler's own probabilities
    tell the drift, so that staleness and numerics count as well as earlier updates."""
    own = batch.mask & ~batch.traj.expert
    keep = importance.offpolicy_keep(score.logp, batch.traj.logp, batch.adv, own, delta=hyper["offpolicy_delta"])
    metrics["kept_offpolicy"] = metrics_lib.masked(keep.astype(jnp.float32), jnp.any(own, axis=-1))
    return jnp.where(keep[..., None], x, 0.0)


def _imitate(term: Imitation, x: Array, score: Score, batch: Batch, hyper: dict[str, Array], metrics: Metrics) -> Array:
    """The per-token loss with that of the expert's tokens in its place; where it is mixed, with both shares."""
    if term.kind == "add":
        return x
    expert, own = batch.traj.expert, term.loss(score, batch, hyper)
    metrics["imitation"] = metrics_lib.masked(jax.lax.stop_gradient(own), batch.mask & expert)
    if term.kind == "mix":
        x, own = (1.0 - hyper["mu"]) * x, hyper["mu"] * own
    return jnp.where(expert, own, x)


def _perception(score: Score, batch: Batch, hyper: dict[str, Array], told: Array, metrics: Metrics) -> Array:
    gap = kl_divergence(score.logp, batch.extra["logp_masked"], estimator="k3", mask=batch.mask)
    metrics["perception"] = metrics_lib.masked(jax.lax.stop_gradient(gap), told)
    return jnp.minimum(gap, hyper["perception_max"])


def _value_error(score: Score, batch: Batch, hyper: dict[str, Array], metrics: Metrics) -> Array:
    mask = batch.mask & batch.extra["value_mask"] if "value_mask" in batch.extra else batch.mask
    error = losses.value_clip(score.value, batch.value, batch.target, eps=hyper["value_eps"], mask=mask)
    metrics["value_loss"] = metrics_lib.masked(jax.lax.stop_gradient(error), mask)
    return error


def diagnostics(score: Score, batch: Batch, hyper: dict[str, Array], told: Array | None = None) -> Metrics:
    """Entropy, clip fractions, old-to-new KL, and ``max_logp_gap``: how far scoring before the first update was from
    sampling. Of the loss tokens, or of those in ``told``."""
    logp, mask = jax.lax.stop_gradient(score.logp), batch.mask if told is None else told
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


class Compared(NamedTuple):
    """What a preference loss reads of its pairs, chosen then rejected, ``[P, 2]``: sums and means over the agent's own
    tokens, and the reference's sums and means (0 without a reference)."""

    total: Array
    mean: Array
    ref_total: Array
    ref_mean: Array


Preference = Callable[[Compared, Score, Batch, dict[str, Array]], Array]


def final_value(score: Score, batch: Batch) -> Array:
    """The value after the last token of an episode, in the last of its rows that was played: ``[P, 2, segments]`` rows
    ``-> [P, 2]``. A reward model's score."""
    segments = jnp.arange(batch.traj.length.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(batch.traj.length > 0, segments, 0), axis=-1, keepdims=True)
    return jnp.take_along_axis(score.bootstrap, last, axis=-1)[..., 0]


def preference_objective(loss: Preference, reward: Callable[[Score, Batch], Array] | None = None) -> Objective:
    """``sum over pairs of weight * loss(pair)``, on ``[P, 2, segments, T]``, observation tokens masked.

    ``margin`` and ``preference_accuracy`` are of the pair's log-ratios, or of ``reward`` where that is what a loss is
    of.
    """

    def objective(scores: dict[str, Score], batch: Batch, hyper: dict[str, Array]) -> tuple[Array, Metrics]:
        score = scores["policy"]
        count = jnp.maximum(jnp.sum(batch.mask, axis=(2, 3)), 1)
        total = lambda x: jnp.sum(jnp.where(batch.mask, x, 0.0), axis=(2, 3))  # noqa: E731
        logp, ref = total(score.logp), total(batch.extra.get("logp_ref", jnp.zeros_like(score.logp)))
        pair = Compared(logp, logp / count, ref, ref / count)
        # A pair's weight stands on each of its tokens.
        weight = jnp.max(batch.weight, axis=(1, 2, 3))
        kept = weight > 0
        gap = jax.lax.stop_gradient((logp - ref)[:, 0] - (logp - ref)[:, 1])
        if reward is not None:
            told = jax.lax.stop_gradient(reward(score, batch))
            gap = told[:, 0] - told[:, 1]
        metrics = diagnostics(score, batch, hyper)
        metrics["margin"] = metrics_lib.masked(gap, kept)
        metrics["preference_accuracy"] = metrics_lib.masked((gap > 0).astype(jnp.float32), kept)
        return jnp.sum(jnp.where(kept, weight * loss(pair, score, batch, hyper), 0.0)), metrics

    return objective


def unpaired_objective(scores: dict[str, Score], batch: Batch, hyper: dict[str, Array]) -> tuple[Array, Metrics]:
    """KTO over rows: ``sum of weight * loss``, the weights ``1 / rows`` of ``weigh_rows``."""
    score = scores["policy"]
    total = lambda x: jnp.sum(jnp.where(batch.mask, x, 0.0), axis=-1)  # noqa: E731
    logp, ref = total(score.logp), total(batch.extra["logp_ref"])
    loss = preference.kto(
        logp, ref, batch.extra["desirable"], batch.extra["kto_reference"], beta=hyper["beta"],
        weight_desirable=hyper["weight_desirable"], weight_undesirable=hyper["weight_undesirable"],
    )  # fmt: skip
    weight = jnp.max(batch.weight, axis=-1)
    gap, kept = jax.lax.stop_gradient(logp - ref), weight > 0
    metrics = diagnostics(score, batch, hyper)
    metrics["margin"] = metrics_lib.masked(jnp.where(batch.extra["desirable"], gap, -gap), kept)
    return jnp.sum(jnp.where(kept, weight * loss, 0.0)), metrics


def weigh_rows(batch: Batch, hyper: dict[str, Array], segments: int) -> Batch:
    """``Algorithm.weigh`` of rows that each have one loss: ``1 / (rows with loss tokens)`` on each of their tokens."""
    del hyper, segments
    kept = jnp.any(batch.mask, axis=-1, keepdims=True)
    return batch._replace(weight=jnp.where(batch.mask, 1.0 / jnp.maximum(jnp.sum(kept), 1), 0.0))
