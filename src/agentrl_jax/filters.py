"""What is left out: parts that clear ``Batch.mask`` (drop), re-draw episodes, or weigh tokens down.

A dropped token leaves numerator and denominator; a token weighed down stays in the denominator. Statistics of the
advantage (returns, lengths, entropies and tokens of a group) count every episode that was played, dropped or not;
``whiten`` alone is over the loss tokens that are left. Formulas with their sources are those of ``selection``,
``entropy`` and ``importance``; here they meet a batch: masks ``bool[B, T]``, one answer an episode ``bool[N]``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax import entropy as entropy_lib
from agentrl_jax import episodes, groups, importance, scoring, selection, stages
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Tools
from agentrl_jax.checks import check_choice
from agentrl_jax.credit import pure
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics, PyTree

Keep = Callable[[Batch, Tools, dict[str, Array]], Array]


def _keep_episodes(
    name: str, keep: Keep, *, hyper: dict[str, float] | None = None, needs: tuple[str, ...] = ()
) -> Part:
    """Drops the loss tokens of episodes that ``keep`` (``-> bool[N]``) does not name."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        _, _, played = stages.episodes(batch, tools)
        kept = keep(batch, tools, hyper) & played
        mask = batch.mask & stages.episode_rows(kept, tools)[:, None]
        return batch._replace(mask=mask), {f"kept_{name}": metrics_lib.masked(kept.astype(jnp.float32), played)}

    return Part(name, pure(function), hyper=hyper or {}, needs=frozenset(needs))


def varied() -> Part:
    """Drops groups that the environment pays all alike: they would only swell the denominators."""

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        return groups.varied(episodes.returns(batch.traj, tools.segments), ids, tools.episodes, where=played)

    return _keep_episodes("varied", keep, needs=("group",))


def complete() -> Part:
    """Drops episodes that a limit cut (overlong filtering): their reward says nothing of what was being done."""

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        del hyper
        return ~jnp.any(batch.traj.truncated.reshape(-1, tools.segments), axis=1)

    return _keep_episodes("complete", keep)


def _keep_groups(name: str, select: Callable[..., Array], number: str, default: float) -> Part:
    """Keeps the groups that ``select(returns, group, num_groups, where, number)`` names; the environment's returns."""

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        _, ids, played = stages.episodes(batch, tools)
        return select(episodes.returns(batch.traj, tools.segments), ids, tools.episodes, played, hyper[number])

    return _keep_episodes(name, keep, hyper={number: default}, needs=("group",))


def uncertain() -> Part:
    """Keeps the ``uncertain_fraction`` of groups whose returns differ most."""
    select = lambda ret, ids, n, who, x: selection.uncertain_groups(ret, ids, n, fraction=x, where=who)  # noqa: E731
    return _keep_groups("uncertain", select, "uncertain_fraction", 0.25)


def uncertain_mass() -> Part:
    """Keeps the fewest groups, most different first, that hold ``uncertain_mass`` of all deviation (RAGEN-2)."""
    select = lambda ret, ids, n, who, x: selection.uncertain_mass(ret, ids, n, mass=x, where=who)  # noqa: E731
    return _keep_groups("uncertain_mass", select, "uncertain_mass", 0.9)


def best_of_group() -> Part:
    """Keeps the first best episode of each group, and none where all are alike at the lowest."""

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        ret = episodes.returns(batch.traj, tools.segments)
        lowest = jnp.min(jnp.where(played, ret, jnp.inf))
        return selection.best_of_group(ret, ids, tools.episodes, where=played) & (ret > lowest)

    return _keep_episodes("best_of_group", keep, needs=("group",))


def correct() -> Part:
    """Keeps episodes that the environment calls a success."""

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        del hyper
        return episodes.right(batch.traj, tools.segments)

    return _keep_episodes("correct", keep, needs=("parts:success",))


def not_all_correct() -> Part:
    """Drops groups all of whose episodes are right: mixed and all wrong ones stay (SRPO).

    Unlike ``varied`` it goes by success, and keeps groups that failed alike: with a reward for more than success these
    teach too. ``drop_solved`` skips such tasks before they are rolled; this one drops what was rolled.
    """

    def keep(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> Array:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        return selection.not_all_correct(episodes.right(batch.traj, tools.segments), ids, tools.episodes, where=played)

    return _keep_episodes("not_all_correct", keep, needs=("group", "parts:success"))


def policy_filtration(*, filtration: str = "power") -> Part:
    """Re-draws the episodes of the batch with replacement, by ``|R|^filtration_power`` or by rank."""
    check_choice("filtration", filtration, ("power", "max-min", "max-random"))

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        ret, _, played = stages.episodes(batch, tools)
        chance = selection.filtration_probability(ret, method=filtration, power=hyper["filtration_power"], where=played)
        drawn = jax.random.choice(key, tools.episodes, (tools.episodes,), p=chance)
        rows = drawn[:, None] * tools.segments + jnp.arange(tools.segments, dtype=drawn.dtype)
        distinct = jnp.zeros(tools.episodes).at[drawn].set(1.0)
        batch = jax.tree.map(lambda x: x[rows.ravel()], batch)
        return memory, batch, {"distinct_episodes": metrics_lib.masked(distinct, played)}

    # An exact reward ranks episodes without error: the environment must report what its noisy one hides.
    return Part("policy_filtration", stage, hyper={"filtration_power": 2.0}, needs=frozenset({"parts:exact_reward"}))


def _reweigh(batch: Batch, keep: Array) -> Batch:
    gate = batch.extra.get("importance", jnp.ones_like(batch.adv))
    return batch._replace(extra={**batch.extra, "importance": jnp.where(keep, gate, 0.0)})


def top_entropy() -> Part:
    """Only the most uncertain tokens learn, the others stay in the denominator (as in TRL).

    ``floor(q n)`` of ``n`` tokens, ``q`` being ``entropy_fraction``; TRL keeps ``floor(q (n - 1)) + 1``.
    """

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del tools
        keep = entropy_lib.top_entropy_mask(batch.extra["entropy"], batch.mask, fraction=hyper["entropy_fraction"])
        return _reweigh(batch, keep), {}

    return Part("top_entropy", pure(function), hyper={"entropy_fraction": 0.2}, needs=frozenset({"scores"}))


def clip_cov() -> Part:
    """Silences a random ``cov_fraction`` of the tokens whose centred ``log pi * A`` lies in (cov_low, cov_high).

    Chosen once, from the scores before the first update: a choice that couples tokens cannot be made inside an
    additive loss. verl chooses anew in every minibatch.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del tools
        keep = entropy_lib.clip_cov_keep(
            batch.logp_old, batch.logp_old, batch.adv, batch.mask, key,
            fraction=hyper["cov_fraction"], low=hyper["cov_low"], high=hyper["cov_high"],
        )  # fmt: skip
        return memory, _reweigh(batch, keep), {"silenced": metrics_lib.masked((~keep).astype(jnp.float32), batch.mask)}

    numbers = {"cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0}
    return Part("clip_cov", stage, hyper=numbers, needs=frozenset({"scores"}))


def kl_cov() -> Part:
    """Marks the ``cov_fraction`` of tokens of highest ``log pi * A`` covariance, which the KL-Cov loss then holds."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del tools
        held = entropy_lib.kl_cov_select(batch.logp_old, batch.adv, batch.mask, fraction=hyper["cov_fraction"])
        return batch._replace(extra={**batch.extra, "held": held}), {}

    return Part("kl_cov", pure(function), hyper={"cov_fraction": 2e-4}, needs=frozenset({"scores"}))


CORRECTIONS = {
    "tis": ("token", "truncate", 0.0, 2.0),
    "mis": ("token", "mask", 0.0, 2.0),
    "icepop": ("token", "mask", 0.5, 5.0),
    "sequence-tis": ("sequence", "truncate", 0.0, 2.0),
    "sequence-mis": ("sequence", "mask", 0.0, 3.0),
    "geometric-tis": ("geometric", "truncate", 0.0, 2.0),
    "geometric-mis": ("geometric", "mask", 0.999, 1.001),
}
"""Name: (level, rule, low, high) of ``importance.importance_weight``; the bounds of IcePop are unconfirmed."""


def behaviour_correction(*, correction: str = "tis", normalise_weights: bool = False, veto: bool = False) -> Part:
    """Multiplies each token's loss by ``pi_old / pi_behaviour``, bounded: for a sampler that is not the trainer.

    ``normalise_weights`` divides the bounded weights by their mean over the batch (over its sequences, where a sequence
    has one weight; rejected ones count as 0). ``veto`` then gives weight 0 to every episode with a token whose ratio is
    below ``veto_floor``: the sampler wrote what the trainer finds all but impossible. Like any rejection here a vetoed
    token stays in the denominators; verl takes it out. Tokens of the expert, of unknown probability, keep weight 1 and
    are read by neither, but go with an episode that is vetoed.
    """
    check_choice("correction", correction, tuple(CORRECTIONS))
    level, rule, low, high = CORRECTIONS[correction]

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        weight = importance.importance_weight(
            batch.logp_old, batch.traj.logp, batch.mask, level=level, rule=rule,
            low=hyper["correction_low"], high=hyper["correction_high"], known=~batch.traj.expert,
        )  # fmt: skip
        known = batch.mask & ~batch.traj.expert if normalise_weights or veto else batch.mask
        if normalise_weights:
            weight = jnp.where(known, _normalised(weight, known, level), weight)
        if veto:
            rows = (stages.sequences(x, tools) for x in (batch.logp_old, batch.traj.logp, known))
            keep = importance.veto(*rows, floor=hyper["veto_floor"])
            weight = jnp.where(stages.episode_rows(keep, tools)[:, None], weight, 0.0)
        gate = batch.extra.get("importance", 1.0)
        batch = batch._replace(extra={**batch.extra, "importance": weight * gate})
        return batch, {"correction_weight": metrics_lib.masked(weight, batch.mask)}

    needs = {"scores"} | ({"one_segment"} if level != "token" else set())
    numbers = {"correction_low": low, "correction_high": high} | ({"veto_floor": 1e-4} if veto else {})
    return Part("behaviour_correction", pure(function), hyper=numbers, needs=frozenset(needs))


def _normalised(weight: Array, known: Array, level: str) -> Array:
    """Weights with a mean of 1: over tokens, or over the rows that have one weight each."""
    if level == "token":
        return importance.normalise_weight(weight, known)
    each = jnp.max(jnp.where(known, weight, 0.0), axis=-1, keepdims=True)
    return importance.normalise_weight(each, jnp.any(known, axis=-1, keepdims=True))


def mark_correct() -> Part:
    """Marks the tokens of successful episodes, ``extra["correct"]``, for a term that imitates them."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        right = episodes.right(batch.traj, tools.segments)
        mark = jnp.broadcast_to(stages.episode_rows(right, tools)[:, None], batch.mask.shape)
        return batch._replace(extra={**batch.extra, "correct": mark}), {}

    return Part("mark_correct", pure(function), needs=frozenset({"parts:success"}))


def masked_observations() -> Part:
    """``extra["logp_masked"]``: what the policy says when bytes of its prompt and observations are blanked out.

    Each is replaced by padding with probability ``perception_mask``; control tokens stay. PAPO blacks out patches of
    an image; this is its form for text.
    """

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        traj, codec = batch.traj, tools.codec
        readable = jnp.asarray(codec.sampleable)[traj.tokens] & (traj.tokens != codec.end_action) & ~traj.mask
        hide = readable & (jax.random.uniform(key, traj.tokens.shape) < hyper["perception_mask"])
        tokens, start = jnp.where(hide, codec.pad, traj.tokens), jnp.zeros(traj.length.shape, jnp.int32)
        scores = tools.score(scoring.View("policy", lambda _: (tokens, start)), batch)
        return memory, batch._replace(extra={**batch.extra, "logp_masked": scores.logp}), {}

    return Part("masked_observations", stage, hyper={"perception_mask": 0.6})
