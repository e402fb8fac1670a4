"""Preference optimisation on the agent's own trajectories, by keyword: which pairs, and which loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import objectives, pairs, parts, preference, stages, trees
from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.compose import override
from agentrl_jax.algorithms.ingredients import Maker, call, check_static, keywords_of, named
from agentrl_jax.checks import check_choice
from agentrl_jax.objectives import Compared, Preference
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Score

PAIRS: dict[str, Maker] = named(
    pairs.best_against_worst, pairs.shortest_against_longest, trees.step_pairs, trees.segment_pairs
)
"""What ``prefer(pairs=...)`` knows."""


class Rule(NamedTuple):
    """A preference loss.

    Attributes:
      loss: ``(Compared, Score, Batch, hyper) -> [P]``.
      rule: the formula, for people.
      hyper: the numbers it reads, and their defaults.
      reference: whether it needs the frozen reference policy.
      reward: ``(Score, Batch) -> [P, 2]``, what is compared where it is not log-probabilities; from a value head.
    """

    loss: Preference
    rule: str
    hyper: dict[str, float]
    reference: bool = True
    reward: Callable[[Score, Batch], Array] | None = None


def _margin(loss: Callable[..., Array], *names: str, mean: bool = False) -> Preference:
    """A loss ``(logp_w, logp_l, ref_w, ref_l, **numbers)`` on sums, or on means."""

    def of(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
        del score, batch
        logp, ref = (pair.mean, pair.ref_mean) if mean else (pair.total, pair.ref_total)
        return loss(logp[:, 0], logp[:, 1], ref[:, 0], ref[:, 1], **{name: hyper[name] for name in names})

    return of


def _means(loss: Callable[..., Array], *names: str) -> Preference:
    """A reference-free loss ``(mean_w, mean_l, **numbers)``."""

    def of(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
        del score, batch
        return loss(pair.mean[:, 0], pair.mean[:, 1], **{name: hyper[name] for name in names})

    return of


def _ipo(logp_w: Array, logp_l: Array, ref_w: Array, ref_l: Array, *, beta: Array) -> Array:
    return preference.ipo(logp_w, logp_l, ref_w, ref_l, beta=beta)


def _dynamic(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del score, hyper
    logp, ref = pair.total, pair.ref_total
    return preference.dpo(logp[:, 0], logp[:, 1], ref[:, 0], ref[:, 1], beta=batch.extra["beta"])


def _cpo(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del score, batch
    return preference.cpo(
        pair.total[:, 0], pair.total[:, 1], -pair.mean[:, 0], beta=hyper["beta"], coef=hyper["nll_coef"]
    )


def _orpo(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del score, batch
    return preference.orpo(pair.mean[:, 0], pair.mean[:, 1], coef=hyper["odds_coef"])


def _dpo_nll(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del score, batch
    logp, ref = pair.total, pair.ref_total
    loss = preference.dpo(logp[:, 0], logp[:, 1], ref[:, 0], ref[:, 1], beta=hyper["beta"])
    return loss - hyper["nll_coef"] * pair.mean[:, 0]


def _dmpo(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del pair
    turns = batch.traj.steps["played"].shape[-1]
    ratio = lambda logp, ref, mask, turn: preference.turn_log_ratio(logp, ref, mask, turn, turns)  # noqa: E731
    every = jax.vmap(jax.vmap(jax.vmap(ratio)))
    each = jnp.sum(every(score.logp, batch.extra["logp_ref"], batch.mask, batch.traj.turn), axis=2)
    last = jnp.max(jnp.where(batch.mask, batch.traj.turn, -1), axis=(2, 3)) + 1
    return preference.dmpo(
        each[:, 0], each[:, 1], last[:, 0], last[:, 1], beta=hyper["beta"], discount=hyper["turn_discount"]
    )


def _bradley_terry(pair: Compared, score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del pair
    reward = objectives.final_value(score, batch)
    return preference.bradley_terry(
        reward[:, 0], reward[:, 1], label_margin=hyper["label_margin"], centre_coef=hyper["centre_coef"]
    )


RULES: dict[str, Rule] = {
    "dpo": Rule(
        _margin(preference.dpo, "beta", "label_smoothing"), "-log sigmoid(beta h), smoothed labels",
        {"beta": 0.1, "label_smoothing": 0.0},
    ),
    "dpo-nll": Rule(
        _dpo_nll, "-log sigmoid(beta h) + nll_coef (mean -log pi of the chosen)", {"beta": 0.1, "nll_coef": 1.0}
    ),
    "robust": Rule(
        _margin(preference.robust_dpo, "beta", "label_noise"),
        "(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), e the share of flipped labels",
        {"beta": 0.1, "label_noise": 0.1},
    ),
    "hinge": Rule(_margin(preference.hinge, "beta"), "max(0, 1 - beta h)", {"beta": 0.1}),
    "ipo": Rule(_margin(_ipo, "beta", mean=True), "(h - 1 / (2 beta))^2, h of means", {"beta": 0.1}),
    "ipo-sum": Rule(_margin(_ipo, "beta"), "(h - 1 / (2 beta))^2, h of sums", {"beta": 0.1}),
    "dynamic": Rule(_dynamic, "-log sigmoid(beta_batch h)", {}),
    "simpo": Rule(
        _means(preference.simpo, "beta", "gamma"), "-log sigmoid(beta (mean_w - mean_l) - gamma)",
        {"beta": 2.0, "gamma": 0.5}, reference=False,
    ),
    "cpo": Rule(
        _cpo, "-log sigmoid(beta (sum_w - sum_l)) + nll_coef (mean -log pi of the chosen)",
        {"beta": 0.1, "nll_coef": 1.0}, reference=False,
    ),
    "orpo": Rule(
        _orpo, "mean -log pi of the chosen - odds_coef log sigmoid(log-odds_w - log-odds_l)", {"odds_coef": 0.1},
        reference=False,
    ),
    "lcpo": Rule(
        _means(preference.lcpo), "-log sigmoid(log-odds_w - log-odds_l)", {}, reference=False
    ),
    "dmpo": Rule(
        _dmpo, "-log sigmoid(beta sum_k (phi_k h_k)), phi the discounted occupancy of turn k",
        {"beta": 0.1, "turn_discount": 0.7},
    ),
    "bradley_terry": Rule(
        _bradley_terry,
        "-log sigmoid(r_w - r_l - label_margin) + centre_coef (r_w + r_l)^2, r the value after an episode's last token",
        {"label_margin": 0.0, "centre_coef": 0.0}, reference=False, reward=objectives.final_value,
    ),
}  # fmt: skip
"""What ``prefer(loss=...)`` knows; ``h`` is the chosen's log-ratio to the reference minus the rejected's."""


def prefer(
    name: str = "custom",
    *,
    loss: str = "dpo",
    pairs: str = "best_against_worst",
    **options: Any,
) -> Algorithm:
    """A preference algorithm on pairs sampled in the step.

    Args:
      name: what results are filed under.
      loss: see ``RULES``.
      pairs: see ``PAIRS``.
      **options: static keywords of the pairs, and numbers.

    Over several turns the environment's terms cancel between policy and reference, since both see the same
    observations; the partition functions of later states do not: that is DMPO's point.

    ``loss="bradley_terry"`` trains no policy but a reward model, the value head behind the policy's last token, on
    episodes that the policy samples: ``Score.bootstrap`` of an episode is then its score. Its gradient reaches the
    layers that both share.

    Raises:
      ValueError: an unknown name or option, with what there is; pairs that a loss cannot read.
    """
    check_choice("loss", loss, tuple(RULES))
    check_choice("pairs", pairs, tuple(PAIRS))
    rule, maker = RULES[loss], PAIRS[pairs]
    if loss == "dmpo" and pairs in ("step_pairs", "segment_pairs"):
        raise ValueError(
            f"dmpo weighs the turns of whole episodes, and {pairs} compares a part that begins late: take loss='dpo'"
        )
    keywords = keywords_of((maker,))
    static = {key: value for key, value in options.items() if key in keywords}
    check_static(name, keywords, static)
    made = [call(maker, static), *_scores(rule, loss)]
    joined = parts.join(made)
    given = {key: value for key, value in options.items() if key not in keywords}
    hyper = override(name, {**joined.hyper, **rule.hyper}, given, ("loss", "pairs", *keywords))
    return Algorithm(
        name=name, prepare=joined.prepare, weigh=objectives.weigh_pairs,
        loss=objectives.preference_objective(rule.loss, rule.reward), hyper=hyper,
        needs=joined.needs - {"scores"}
        | ({"reference"} if rule.reference else set())
        | ({"critic"} if rule.reward is not None else set()),
        init=joined.init, collect=joined.collect,
    )  # fmt: skip


def _scores(rule: Rule, loss: str) -> list[Part]:
    found = [Part("scores", stages.score_policy(always=loss == "dynamic"))]
    if rule.reference:
        found.append(Part("reference_scores", stages.score_reference(), needs=frozenset({"reference"})))
    if loss == "dynamic":
        found.append(pairs.dynamic_beta())
    return found


def unpaired(name: str = "custom", **options: Any) -> Algorithm:
    """KTO: every episode by itself, desirable or not.

    Raises:
      ValueError: an unknown option, with what there is.
    """
    made = [
        Part("scores", stages.score_policy()),
        Part("reference_scores", stages.score_reference(), needs=frozenset({"reference"})),
        pairs.desirable(),
    ]
    joined = parts.join(made)
    numbers = {"beta": 0.1, "weight_desirable": 1.0, "weight_undesirable": 1.0}
    return Algorithm(
        name=name, prepare=joined.prepare, weigh=objectives.weigh_rows, loss=objectives.unpaired_objective,
        hyper=override(name, {**joined.hyper, **numbers}, options, ()), needs=joined.needs, init=joined.init,
        collect=joined.collect,
    )  # fmt: skip
