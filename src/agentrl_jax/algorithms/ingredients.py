"""The ingredients of an algorithm, by the keyword of ``compose`` that chooses them, and how their makers are called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from agentrl_jax import collect as collectors
from agentrl_jax import credit, filters, history, replay, rewards, shaping, trees
from agentrl_jax.algorithms.finishing import FINISH
from agentrl_jax.checks import check_numbers
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.parts import Part
from agentrl_jax.surrogates import CLIPS, IMITATIONS, RATIOS, Imitation, Loss

Maker = Callable[..., Part]


def named(*functions: Maker) -> dict[str, Maker]:
    """The functions by their names."""
    return {function.__name__: function for function in functions}


KINDS: dict[str, dict[str, Maker]] = {
    "collect": named(
        collectors.greedy_baseline, collectors.refill, history.skip_settled, history.drop_solved,
        collectors.difficulty_rolls, collectors.resample_correct, collectors.hints, collectors.mixed_expert,
        trees.vine, trees.tree,
    ),
    "reward": named(
        rewards.soft_overlong, rewards.malformed_penalty, rewards.step_reward, rewards.posterior_reward,
        rewards.running_scale,
    ),
    "filters": named(
        filters.varied, filters.complete, filters.uncertain, filters.uncertain_mass, filters.best_of_group,
        filters.correct, filters.not_all_correct, filters.policy_filtration,
    ),
    "advantage": named(
        credit.group, credit.own_group, credit.leave_one_out, credit.length_weighted, credit.gpg, credit.gdpo,
        credit.pass_at_k, credit.max_at_k, credit.best_gap, credit.gigpo, credit.turn_relative,
        credit.process_relative, credit.tag_relative, credit.optimal_token, credit.returns, credit.ones, credit.gae,
        credit.turn_gae, credit.bilevel_gae, credit.vapo_gae, credit.vtrace, collectors.subtract_baseline,
        trees.vine_advantage, trees.tree_advantage,
    ),
    "shaping": named(
        shaping.whiten, shaping.entropy_shaped, shaping.entropy_scaled, shaping.aspo_shaped, shaping.ktae_shaped,
        trees.shared_prefix,
    ),
    "tokens": named(filters.top_entropy, filters.clip_cov, filters.kl_cov),
    "replay": named(replay.replay),
}  # fmt: skip
"""Keyword of ``compose``, in the order the parts act: the parts it knows."""

PAIRED = {
    "subtract_baseline": ("collect", "greedy_baseline"),
    "vine_advantage": ("collect", "vine"),
    "tree_advantage": ("collect", "tree"),
    "shared_prefix": ("collect", "tree"),
}
"""Parts that read what another one leaves."""


class Choice(NamedTuple):
    """What ``compose`` was asked for, and what follows from it alone.

    Attributes:
      makers: the functions of the chosen parts, in order.
      loss, imitation: the policy loss, and the term beside it.
      kl, kl_in, kl_corrected: estimator or None; where its penalty stands; whether it is corrected by the ratio.
      kl_off: whether ``kl_coef=0`` is why there is none.
      correction, perception, offpolicy_mask: as in ``compose``.
      aggregation: as in ``compose``.
      finish: names of ``FINISH``.
    """

    makers: tuple[Maker, ...]
    loss: Loss
    imitation: Imitation | None
    kl: str | None
    kl_in: str
    kl_corrected: bool
    kl_off: bool
    correction: str | None
    perception: bool
    offpolicy_mask: bool
    aggregation: str
    finish: tuple[str, ...]


def choices() -> dict[str, tuple[str, ...]]:
    """Every keyword of ``compose`` that takes names, and the names."""
    named = {kind: tuple(makers) for kind, makers in KINDS.items()}
    more = {
        "ratio": RATIOS, "clip": CLIPS, "correction": tuple(filters.CORRECTIONS), "imitation": tuple(IMITATIONS),
        "kl": ESTIMATORS, "kl_in": ("loss", "reward"), "finish": tuple(FINISH),
    }  # fmt: skip
    return named | more


def keywords_of(makers: tuple[Maker, ...]) -> dict[str, Any]:
    """Static keywords of the makers, with their types."""
    return {name: kind for maker in makers for name, kind in _parameters(maker).items()}


def _parameters(maker: Maker) -> dict[str, Any]:
    hints = typing.get_type_hints(maker)
    return {name: hints[name] for name in inspect.signature(maker).parameters}


def call(maker: Maker, static: dict[str, Any]) -> Part:
    """The maker's part, with those of the keywords that it has."""
    own = inspect.signature(maker).parameters
    return maker(**{key: value for key, value in static.items() if key in own})


def check_given(name: str, makers: tuple[Maker, ...], static: dict[str, Any]) -> None:
    """Refuses parts without a keyword that has no default."""
    for maker in makers:
        for key, parameter in inspect.signature(maker).parameters.items():
            if parameter.default is inspect.Parameter.empty and key not in static:
                raise ValueError(f"{name}: {maker.__name__} needs {key}=")


def check_static(name: str, keywords: dict[str, Any], static: dict[str, Any]) -> None:
    """A part branches on its switches: a string such as ``"no"`` would be true."""
    for key, value in static.items():
        allowed = typing.get_args(keywords[key]) if typing.get_origin(keywords[key]) is not tuple else (tuple,)
        allowed = allowed or (keywords[key],)
        if value is None and type(None) in allowed:
            continue
        if float in allowed:
            check_numbers({key: value})
        elif type(value) not in allowed:
            raise ValueError(f"{name}: {key} must be of type {allowed[0].__name__}, got {value!r}")
