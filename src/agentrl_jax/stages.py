"""Stages: what happens to a trajectory before the loss. A chain of them is an algorithm's ``prepare``.

A stage is ``(memory, Batch, Tools, hyper, key) -> (memory, Batch, Metrics)``. Rows are not episodes: estimators see
the rows of one (episode, role) laid end to end, and groups and statistics count (episode, role) once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from agentrl_jax import advantages, groups, masked, scoring
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Tools
from agentrl_jax.checks import check_at_least, check_choice
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.kl import kl as kl_divergence
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Trajectory

Stage: TypeAlias = Callable[[PyTree, Batch, Tools, dict[str, Array], Array], tuple[PyTree, Batch, Metrics]]


def chain(*stages: Stage, teacher: bool = False) -> Callable[..., tuple[PyTree, Batch, Metrics]]:
    """``Algorithm.prepare`` from stages, in order, each with its own key.

    The batch begins with every number zero and the sampled tokens as its mask; with ``teacher`` the expert's tokens
    count too.
    """

    def prepare(
        memory: PyTree, traj: Trajectory, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        batch, metrics = scoring.as_batch(traj, traj.mask if teacher else None), {}
        for i, stage in enumerate(stages):
            memory, batch, more = stage(memory, batch, tools, hyper, jax.random.fold_in(key, i))
            metrics = metrics_lib.merge(metrics, more)
        return memory, batch, metrics

    return prepare


def sequences(x: Array, tools: Tools) -> Array:
    """Rows of one (episode, role) end to end: ``[N * segments, T] -> [N, segments * T]``."""
    return x.reshape(-1, tools.segments * x.shape[-1])


def episode_rows(x: Array, tools: Tools) -> Array:
    """One value an (episode, role) to one a row: ``[N] -> [N * segments]``."""
    return jnp.repeat(x, tools.segments, axis=0)


def episodes(batch: Batch, tools: Tools) -> tuple[Array, Array, Array]:
    """``(return, group, played)`` of every (episode, role), each ``[N]``: the undiscounted sum of ``traj.reward``."""
    traj = batch.traj
    ret = jnp.sum(sequences(traj.reward, tools), axis=1)
    return ret, traj.group[:: tools.segments], traj.length[:: tools.segments] > 0


def broadcast(batch: Batch, adv: Array, tools: Tools) -> Batch:
    """Gives every loss token the advantage of its episode: ``adv`` ``[N]``."""
    rows = episode_rows(adv, tools)[:, None]
    return batch._replace(adv=jnp.where(batch.mask, rows, 0.0))


def group_advantage(estimator: Callable[..., Array], **options: Any) -> Stage:
    """``A = estimator(return, group, num_groups, where=played, **options)`` of the episode, on each of its tokens.

    Raises:
      ValueError: options that the estimator refuses; it is traced once, on two episodes.
    """
    ret, group = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    jax.eval_shape(lambda r, g: estimator(r, g, 1, **options), ret, group)

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        ret, group, played = episodes(batch, tools)
        # As many groups as episodes, at most: `Start.group` may make more of them than equal groups would be.
        adv = estimator(ret, group, tools.episodes, where=played, **options)
        return memory, broadcast(batch, adv, tools), zero_variance(batch, tools)

    return stage


def zero_variance(batch: Batch, tools: Tools) -> Metrics:
    """Share of groups that the environment pays all alike: they teach a group-relative method nothing.

    Its own reward counts, whatever stages made of ``traj.reward``: a penalty differs within any group.
    """
    _, group, played = episodes(batch, tools)
    ret, num_groups = jnp.sum(sequences(batch.traj.steps["reward"], tools), axis=1), tools.episodes
    who = groups.members(group, num_groups, played)
    spread = groups.group_sum(groups.above_lowest(ret, who, num_groups), who, num_groups)
    counted = groups.group_sum(jnp.ones_like(ret), who, num_groups)
    first = _first_of_group(group, played, num_groups)
    return {"zero_variance": metrics_lib.masked((spread <= 0).astype(jnp.float32), first & (counted > 0))}


def _first_of_group(group: Array, played: Array, num_groups: int) -> Array:
    index = jnp.arange(group.shape[0], dtype=jnp.int32)
    first = jax.ops.segment_min(jnp.where(played, index, group.shape[0]), group, num_groups)
    return index == first[group]


def return_to_go(baseline: str = "ema", decay: float = 0.9) -> Stage:
    """``A_t = G_t - b`` with the discounted return to go ``G_t`` (``hyper["discount"]``) and a baseline independent
    of the action.

    ``b`` is a running mean of episode returns (``ema``, debiased, kept in memory as ``(mean, weight)`` and updated
    after use) or 0 (``none``). Source: Williams, 1992 (REINFORCE).
    """
    if baseline not in ("ema", "none"):
        raise ValueError(f"baseline must be 'ema' or 'none', got {baseline!r}")

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del key
        reward, mask = sequences(batch.traj.reward, tools), sequences(batch.traj.mask, tools)
        ret = jax.vmap(lambda r, m: advantages.discounted_return(r, m, discount=hyper["discount"]))(reward, mask)
        total, _, played = episodes(batch, tools)
        if baseline == "none":
            return memory, batch._replace(adv=ret.reshape(batch.adv.shape)), {}
        mean, weight = memory
        value = jnp.where(weight > 0, mean / jnp.maximum(weight, 1e-8), 0.0)
        now = masked.masked_mean(total, played)
        new = (decay * mean + (1 - decay) * now, decay * weight + (1 - decay))
        # A return that is not a number would never leave the mean again, and nothing played is no return of 0.
        keep = jnp.isfinite(now) & jnp.any(played)
        memory = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, memory)
        adv = jnp.where(batch.mask, ret.reshape(batch.adv.shape) - value, 0.0)
        return memory, batch._replace(adv=adv), {"baseline": metrics_lib.scalar(value)}

    return stage


def score_policy(*, always: bool = False) -> Stage:
    """``logp_old``, ``value``, ``bootstrap`` and ``extra["entropy"]`` from the parameters at the start of the step.

    Skipped when the step makes a single update (``Tools.single``), unless ``always``: with a critic the values are
    needed. The entropy is kept with ``always`` alone.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        if tools.single and not always:
            return memory, batch, {}
        scores = tools.score(scoring.View(), batch)
        batch = batch._replace(logp_old=scores.logp, value=scores.value, bootstrap=scores.bootstrap)
        if always:
            batch = batch._replace(extra={**batch.extra, "entropy": scores.entropy})
        return memory, batch, {}

    return stage


def score_reference() -> Stage:
    """``extra["logp_ref"]``: the frozen reference policy's log-probabilities."""

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        scores = tools.score(scoring.View("reference"), batch)
        return memory, batch._replace(extra={**batch.extra, "logp_ref": scores.logp}), {}

    return stage


def kl_in_reward(estimator: str = "k1") -> Stage:
    """``r_t <- r_t - kl_coef * k(logp_old, logp_ref)_t`` on the policy's own tokens; after both have been scored.

    The expert's tokens are no samples of the policy: they tell nothing of its divergence, and cost nothing.

    k1 in the reward is the unbiased gradient of the reverse KL (Tang & Munos, 2025, arXiv 2506.09477).

    Raises:
      ValueError: an unknown estimator.
    """
    check_choice("estimator", estimator, ESTIMATORS)

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del tools, key
        own = batch.mask & ~batch.traj.expert
        penalty = kl_divergence(batch.logp_old, batch.extra["logp_ref"], estimator=estimator, mask=own)
        reward = batch.traj.reward - jnp.where(own, hyper["kl_coef"] * penalty, 0.0)
        metrics = {"kl_reward": metrics_lib.masked(penalty, own)}
        return memory, batch._replace(traj=batch.traj._replace(reward=reward)), metrics

    return stage


def gae(*, decoupled: bool = False) -> Stage:
    """``adv`` and ``target`` by GAE over written tokens (``hyper["discount"]``, ``hyper["lambda_"]``), after
    ``score_policy``; with ``decoupled`` the targets by a lambda of their own, ``hyper["lambda_critic"]``.

    The rows of an episode are one sequence; only its last row bootstraps, and only when it was truncated.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del key
        traj = batch.traj
        bootstrap = jnp.where(traj.truncated, batch.bootstrap, 0.0).reshape(-1, tools.segments).sum(axis=1)

        def estimate(reward: Array, value: Array, mask: Array, bootstrap: Array) -> tuple[Array, Array]:
            shared = {"discount": hyper["discount"], "bootstrap": bootstrap}
            if not decoupled:
                return advantages.gae(reward, value, mask, lambda_=hyper["lambda_"], **shared)
            both = {"lambda_policy": hyper["lambda_"], "lambda_critic": hyper["lambda_critic"]}
            return advantages.decoupled_gae(reward, value, mask, **both, **shared)

        reward, value, mask = (sequences(x, tools) for x in (traj.reward, batch.value, traj.mask))
        found = jax.vmap(estimate)(reward, value, mask, bootstrap)
        adv, target = (x.reshape(batch.adv.shape) for x in found)
        explained = explained_variance(target, batch.value, batch.mask)
        return memory, batch._replace(adv=adv, target=target), {"explained_variance": metrics_lib.scalar(explained)}

    return stage


def explained_variance(target: Array, value: Array, mask: Array) -> Array:
    """``1 - Var(target - value) / Var(target)`` over the masked tokens; 0 where the targets are all equal."""
    # Measured from the lowest: equal targets then differ by exactly 0, not by the rounding of their mean.
    low = jnp.min(masked.fill(target, mask, jnp.inf))
    spread = masked.masked_var(target - jnp.where(jnp.isfinite(low), low, 0.0), mask)
    return jnp.where(spread > 0, 1 - masked.masked_var(target - value, mask) / jnp.maximum(spread, 1e-8), 0.0)


def whiten(ddof: float = 1) -> Stage:
    """``A <- (A - mean) / std`` over the batch's loss tokens; before the split into minibatches, so no split changes
    it.

    Raises:
      ValueError: a negative ``ddof``.
    """
    check_at_least(0, ddof=ddof)

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del tools, hyper, key
        return memory, batch._replace(adv=masked.whiten(batch.adv, batch.mask, ddof=ddof)), {}

    return stage


def as_pairs(batch: Batch, pair: Array, kept: Array, tools: Tools) -> Batch:
    """The episodes ``pair`` ``int32[P, 2]`` (chosen, rejected), every array ``[P, 2, segments, ...]``; the mask of a
    pair that is not ``kept`` is cleared."""
    rows = pair[..., None] * tools.segments + jnp.arange(tools.segments, dtype=pair.dtype)
    pairs = jax.tree.map(lambda x: x[rows], batch)
    return pairs._replace(mask=pairs.mask & kept[:, None, None, None])


def best_against_worst() -> Stage:
    """Pairs for preference losses: each group's best and worst episode, ``[P, 2, segments, T]``; ties are dropped.

    A group whose returns are all equal expresses no preference: its mask is cleared. There are as many pairs as equal
    groups would be (``Tools.groups``); groups of a ``Start`` beyond these give no pair, and count in ``pairs_kept``.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        ret, group, played = episodes(batch, tools)
        every = (group == jnp.arange(tools.episodes, dtype=group.dtype)[:, None]) & played
        member, beyond = every[: tools.groups], jnp.any(every[tools.groups :], axis=1)
        best = jnp.argmax(jnp.where(member, ret, -jnp.inf), axis=1)
        worst = jnp.argmin(jnp.where(member, ret, jnp.inf), axis=1)
        kept = jnp.any(member, axis=1) & (ret[best] > ret[worst])
        pairs = as_pairs(batch, jnp.stack([best, worst], axis=1), kept, tools)
        total, count = metrics_lib.masked(kept.astype(jnp.float32), jnp.ones_like(kept))
        metrics = {"pairs_kept": (total, count + jnp.sum(beyond, dtype=jnp.float32))}
        return memory, pairs, metrics | zero_variance(batch, tools)

    return stage
