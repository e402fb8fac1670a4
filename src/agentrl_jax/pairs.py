"""Who is compared with whom: parts that make the pairs and labels of preference losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax import credit, episodes, preference, scoring, stages
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics, PyTree


def best_against_worst() -> Part:
    """Each group's best episode against its worst; ties are dropped."""
    return Part("best_against_worst", stages.best_against_worst(), needs=frozenset({"pairs"}))


def shortest_against_longest(*, all_correct: bool = True) -> Part:
    """Each group's shortest correct episode against its longest correct one; equal lengths are dropped.

    With ``all_correct`` only groups without a wrong answer count: the task is easy enough to be brief about.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        _, group, played = stages.episodes(batch, tools)
        right = episodes.right(batch.traj, tools.segments)
        member = (group == jnp.arange(tools.groups, dtype=group.dtype)[:, None]) & played
        able = member & right
        length = credit.written(batch, tools)
        short = jnp.argmin(jnp.where(able, length, jnp.inf), axis=1)
        long = jnp.argmax(jnp.where(able, length, -jnp.inf), axis=1)
        kept = jnp.any(able, axis=1) & (length[short] < length[long])
        if all_correct:
            kept &= jnp.all(able == member, axis=1)
        pairs = stages.as_pairs(batch, jnp.stack([short, long], axis=1), kept, tools)
        kept = metrics_lib.masked(kept.astype(jnp.float32), jnp.ones_like(kept))
        return memory, pairs, {"pairs_kept": kept} | stages.zero_variance(batch, tools)

    return Part("shortest_against_longest", stage, needs=frozenset({"pairs", "parts:success"}))


def _gap(batch: Batch) -> Array:
    """``h`` of every pair by the scores before the update, ``[P]``."""
    total = lambda x: jnp.sum(jnp.where(batch.mask, x, 0.0), axis=(2, 3))  # noqa: E731
    ratio = total(batch.logp_old) - total(batch.extra["logp_ref"])
    return ratio[:, 0] - ratio[:, 1]


def dynamic_beta() -> Part:
    """beta-DPO: ``extra["beta"]`` from the batch's mean gap against its running mean, and a draw of the
    ``kept_pairs`` share of pairs by how usual their gap is."""

    def init(key: Array, shape: Shape) -> PyTree:
        del key, shape
        return {"mean": jnp.zeros(()), "std": jnp.ones(())}

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del tools
        gap, kept = _gap(batch), jnp.any(batch.mask, axis=(1, 2, 3))
        mean, std = memory["mean"], memory["std"]
        beta = preference.dynamic_beta(gap, mean, beta=hyper["beta"], alpha=hyper["beta_alpha"], where=kept)
        chance = preference.gap_probability(gap, mean, std, where=kept)
        order = jnp.where(kept, jnp.log(jnp.maximum(chance, 1e-30)) + jax.random.gumbel(key, gap.shape), -jnp.inf)
        number = jnp.ceil(hyper["kept_pairs"] * jnp.sum(kept, dtype=jnp.float32))
        rank = jnp.zeros(gap.shape, jnp.int32).at[jnp.argsort(-order)].set(jnp.arange(gap.shape[0], dtype=jnp.int32))
        drawn = kept & (rank < number)
        new_mean, new_std = preference.gap_moments(mean, std, gap, where=kept)
        extra = {**batch.extra, "beta": jnp.broadcast_to(beta, gap.shape)}
        batch = batch._replace(mask=batch.mask & drawn[:, None, None, None], extra=extra)
        return {"mean": new_mean, "std": new_std}, batch, {"beta": metrics_lib.scalar(beta)}

    numbers = {"beta": 0.1, "beta_alpha": 0.6, "kept_pairs": 0.8}
    return Part("dynamic_beta", stage, hyper=numbers, needs=frozenset({"scores"}), init=init)


def desirable() -> Part:
    """KTO's labels, ``extra["desirable"]``: a return above ``desirable_above``; and its reference point,
    ``extra["kto_reference"]``.

    The reference point is ``max(0, mean(log pi - log pi_ref))`` of responses under another task's prompt: row i's
    words behind the prompt of the next group. Words that the longer prompt pushes out of the row are left out.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del key
        if tools.groups < 2:
            raise ValueError("KTO's reference point needs answers to another task: two groups at least, got one")
        ret, _, played = stages.episodes(batch, tools)
        good = ret > hyper["desirable_above"]
        tokens, offset, inside = mismatched_rows(batch, tools)
        view = lambda model: scoring.View(model, lambda _: (tokens, offset))  # noqa: E731
        policy, reference = (tools.score(view(model), batch).logp for model in ("policy", "reference"))
        total = lambda x: jnp.sum(jnp.where(inside, x, 0.0), axis=1)  # noqa: E731
        point = preference.kto_reference(total(policy), total(reference), where=jnp.any(inside, axis=1))
        extra = {
            **batch.extra, "desirable": stages.episode_rows(good, tools),
            "kto_reference": jnp.broadcast_to(point, batch.mask.shape[:1]),
        }  # fmt: skip
        metrics = {
            "desirable": metrics_lib.masked(good.astype(jnp.float32), played),
            "kto_reference": metrics_lib.scalar(point),
        }
        return memory, batch._replace(extra=extra), metrics | stages.zero_variance(batch, tools)

    needs = frozenset({"reference", "one_segment"})
    return Part("desirable", stage, hyper={"desirable_above": 0.5}, needs=needs)


def mismatched_rows(batch: Batch, tools: Tools) -> tuple[Array, Array, Array]:
    """Row i's words behind the prompt of the row a group later: ``(tokens [B, T], offset [B], inside bool[B, T])``.

    ``offset`` is how far a token moves, ``inside`` which of the row's loss tokens are still there.
    """
    traj, width = batch.traj, batch.traj.tokens.shape[-1]
    index = jnp.arange(width, dtype=jnp.int32)
    start = jnp.argmax(traj.mask, axis=1).astype(jnp.int32)
    other, other_start = (jnp.roll(x, -tools.group_size, axis=0) for x in (traj.tokens, start))
    offset = other_start - start
    from_own = jnp.clip(index - offset[:, None], 0, width - 1)
    own = jnp.take_along_axis(traj.tokens, from_own, axis=1)
    tokens = jnp.where(index < other_start[:, None], other, own)
    return tokens, offset, batch.mask & (index + offset[:, None] < width)
