"""Which ingredients do not go together, and why: refused when an algorithm is composed."""

from __future__ import annotations

import inspect
from typing import Any

from agentrl_jax.algorithms.ingredients import KINDS, PAIRED, Choice

_LARGER = "makes groups larger than group_size"
_TOKENWISE = ("gae", "turn_gae", "bilevel_gae", "vapo_gae", "vtrace", "returns", "gigpo", "turn_relative",
              "process_relative", "tag_relative", "optimal_token", "vine_advantage", "entropy_shaped",
              "ktae_shaped", "shared_prefix")  # fmt: skip
_CRITICS = ("gae", "turn_gae", "bilevel_gae", "vapo_gae", "vtrace")
_DIVIDED = ("best_gap", "turn_relative", "process_relative")
_UNPAID = ("gdpo", "ones", "vine_advantage", "pass_at_k")
CLASHES: dict[tuple[str, str], str] = {
    ("ktae_shaped", "difficulty_rolls"): f"difficulty_rolls {_LARGER}, up to which ktae_shaped counts",
    ("ktae_shaped", "policy_filtration"): f"policy_filtration {_LARGER}, up to which ktae_shaped counts",
    ("pass_at_k", "difficulty_rolls"): "difficulty_rolls makes groups smaller than k",
    ("max_at_k", "difficulty_rolls"): "difficulty_rolls makes groups smaller than k",
    ("tree_advantage", "policy_filtration"): "policy_filtration moves the rows that branches name as their parents",
    ("shared_prefix", "policy_filtration"): "policy_filtration moves the rows that branches name as their parents",
    ("running_scale", "subtract_baseline"): "the greedy episode's return, which it subtracts, is not scaled",
    ("ones", "whiten"): "whitening makes equal advantages 0",
    ("replay", "whiten"): "after whitening a group of equals is not 0, so nothing would be replaced",
    ("replay", "gdpo"): "gdpo centres the batch: a group of equals is not 0, so nothing would be replaced",
    ("replay", "returns"): "replay replaces groups of equals, and returns compares none",
    ("replay", "subtract_baseline"): "replay replaces groups of equals, and subtract_baseline compares none",
}
"""Parts that do not go together, and why."""


def check_fit(choice: Choice, ratio: str) -> None:
    """Refuses ingredients that contradict each other."""
    names = [maker.__name__ for maker in choice.makers]
    _check_divergence(choice)
    for name, (kind, other) in PAIRED.items():
        if name in names and other not in names:
            raise ValueError(f"{name} reads what {other} leaves: it needs {kind}={other!r}")
    if choice.imitation is not None and choice.imitation.expert and "mixed_expert" not in names:
        raise ValueError("this imitation is of the expert's tokens: it needs collect='mixed_expert'")
    if choice.loss.sequence and ratio != "sequence-token" and "sum" in choice.aggregation:
        raise ValueError(
            f"the {ratio} ratio gives a whole sequence one loss, which {choice.aggregation} would multiply by its "
            "length: take seq-mean-token-mean or token-mean"
        )
    if ("kl_cov" in names) != (choice.loss.hyper.keys() == {"cov_coef"}):
        raise ValueError("tokens 'kl_cov' and clip 'kl-cov' are two halves of one method: choose both")
    _check_pairs(set(names))
    _check_meaning(choice, ratio, set(names))
    if choice.loss.single and choice.correction is not None:
        raise ValueError(f"ratio 'none' is on-policy: a correction ({choice.correction}) has nothing to correct")
    if "reset_reference" in choice.finish and (choice.kl is None or choice.kl_in != "loss"):
        raise ValueError("reset_reference needs a divergence in the loss: kl='k3'")
    if "adapt_kl" in choice.finish and choice.kl is None:
        raise ValueError("adapt_kl needs a divergence: kl='k3'")
    if "anneal_imitation" in choice.finish and (choice.imitation is None or choice.imitation.kind != "mix"):
        raise ValueError("anneal_imitation needs an imitation that is mixed in: chord or chord-phi")


def _check_divergence(choice: Choice) -> None:
    """Refuses what is about a divergence that a coefficient of 0 takes away."""
    about = ["kl_corrected"] if choice.kl_corrected else []
    about += [name for name in choice.finish if name in ("reset_reference", "adapt_kl")]
    if choice.kl_off and about:
        raise ValueError(f"{about[0]} is about a divergence, and kl_coef=0 leaves none: give kl_coef a positive value")


def _check_pairs(names: set[str]) -> None:
    for (one, other), why in CLASHES.items():
        if {one, other} <= names:
            raise ValueError(f"{one} does not go with {other}: {why}")
    for reader, (_, source) in PAIRED.items():
        others = {name for name, (_, of) in PAIRED.items() if of == source} - {reader}
        if source in names and source != "tree" and not names & {reader, *others}:
            raise ValueError(f"{source} rolls what nothing reads: choose advantage={reader!r}")
    flat = names & {"aspo_shaped", "entropy_scaled"}
    fine = names & set(_TOKENWISE)
    if flat and fine:
        raise ValueError(f"{min(flat)} gives an episode one advantage, and would flatten that of {min(fine)}")


def _check_meaning(choice: Choice, ratio: str, names: set[str]) -> None:
    """Refuses what would compile, and mean nothing."""
    if choice.kl_corrected and (choice.kl is None or choice.kl_in != "loss"):
        raise ValueError(
            "kl_corrected is about the gradient of a divergence in the loss: choose kl='k3' and kl_in='loss' (in the "
            "reward it is taken before the first update, where the ratio is 1)"
        )
    if choice.kl == "k1" and choice.kl_in == "loss" and not choice.kl_corrected:
        raise ValueError(
            "k1 in the loss has an expected gradient of 0: take k2 or k3, kl_corrected=True, or kl_in='reward'"
        )
    if choice.offpolicy_mask:
        _check_offpolicy(choice, names)
    fine = names & set(_TOKENWISE)
    if choice.loss.sequence and ratio != "sequence-token" and fine:
        raise ValueError(
            f"the {ratio} ratio gives a sequence one advantage, and would average that of {min(fine)} away"
        )
    silenced = names & {"top_entropy", "clip_cov"}
    if choice.loss.sequence and silenced:
        raise ValueError(f"{min(silenced)} silences tokens, and the {ratio} ratio moves all tokens of a sequence alike")
    paid = names & set(KINDS["reward"]) | ({"kl_penalty"} if choice.kl and choice.kl_in == "reward" else set())
    deaf = names & set(_UNPAID)
    if paid and deaf:
        raise ValueError(f"{min(deaf)} reads the environment's own reward: {min(paid)} would be ignored or distort it")
    if "ones" in names and not names & (set(KINDS["filters"]) - {"complete", "not_all_correct"}):
        raise ValueError("advantage 'ones' rewards everything alike: it needs a filter, such as best_of_group")
    if "mixed_expert" in names and choice.imitation is None:
        raise ValueError("mixed_expert without an imitation only shifts the baseline: choose imitation=")
    if "vtrace" in names and choice.correction is not None:
        raise ValueError("vtrace corrects for the behaviour policy already: a correction would do so twice")
    if "replay" in names and (choice.loss.single or choice.perception):
        raise ValueError("replayed episodes need a ratio to correct them, and have no masked scores (perception)")


def _check_offpolicy(choice: Choice, names: set[str]) -> None:
    if choice.loss.single:
        raise ValueError("ratio 'none' is on-policy: offpolicy_mask has nothing to silence")
    positive = names & {"ones", "best_gap"}
    if positive and not names & {"whiten", "ktae_shaped"}:
        raise ValueError(f"offpolicy_mask silences negative advantages, and those of {min(positive)} never are")


def check_options(choice: Choice, given: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuses options that mean nothing beside the ingredients: ``given`` ones, and with a preset's ``known`` ones."""
    for key in ("normalise_weights", "veto"):
        if key in given and choice.correction is None:
            raise ValueError(f"{key} is about the weights of a correction: choose correction='tis' or another")
    if "running_scale" in {maker.__name__ for maker in choice.makers}:
        _check_scale(choice, known)


def _check_scale(choice: Choice, known: dict[str, Any]) -> None:
    """A scale of all there is to earn is lost where advantages are divided by a deviation of their own."""
    makers = {maker.__name__: maker for maker in choice.makers}
    others = makers.keys() & (set(KINDS["reward"]) - {"running_scale"})
    if others or (choice.kl is not None and choice.kl_in == "reward"):
        return
    divided = sorted(makers.keys() & {*_DIVIDED})
    for name in makers.keys() & KINDS["advantage"].keys():
        scale = inspect.signature(makers[name]).parameters.get("scale")
        if scale is not None and known.get("scale", scale.default) != "none":
            divided.append(name)
    if "whiten" in makers and not makers.keys() & {*_CRITICS}:
        divided.append("whiten")
    if divided:
        raise ValueError(
            f"running_scale divides every reward by one number, and {divided[0]} by a deviation of its own: nothing "
            "would change (scale='none' keeps it)"
        )
