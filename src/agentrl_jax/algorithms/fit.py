"""Which ingredients do not go together, and why: refused when an algorithm is composed."""

from __future__ import annotations

from agentrl_jax.algorithms.ingredients import KINDS, PAIRED, Choice

_LARGER = "makes groups larger than group_size"
_TOKENWISE = ("gae", "turn_gae", "bilevel_gae", "vapo_gae", "vtrace", "returns", "gigpo", "turn_relative",
              "process_relative", "vine_advantage", "entropy_shaped", "ktae_shaped", "shared_prefix")  # fmt: skip
_UNPAID = ("gdpo", "ones", "vine_advantage", "pass_at_k")
CLASHES: dict[tuple[str, str], str] = {
    ("ktae_shaped", "difficulty_rolls"): f"difficulty_rolls {_LARGER}, up to which ktae_shaped counts",
    ("ktae_shaped", "policy_filtration"): f"policy_filtration {_LARGER}, up to which ktae_shaped counts",
    ("pass_at_k", "difficulty_rolls"): "difficulty_rolls makes groups smaller than k",
    ("max_at_k", "difficulty_rolls"): "difficulty_rolls makes groups smaller than k",
    ("tree_advantage", "policy_filtration"): "policy_filtration moves the rows that branches name as their parents",
    ("shared_prefix", "policy_filtration"): "policy_filtration moves the rows that branches name as their parents",
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
    if choice.kl == "k1" and choice.kl_in == "loss":
        raise ValueError("k1 in the loss has an expected gradient of 0: take k2 or k3, or kl_in='reward'")
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
    if "ones" in names and not names & (set(KINDS["filters"]) - {"complete"}):
        raise ValueError("advantage 'ones' rewards everything alike: it needs a filter, such as best_of_group")
    if "mixed_expert" in names and choice.imitation is None:
        raise ValueError("mixed_expert without an imitation only shifts the baseline: choose imitation=")
    if "vtrace" in names and choice.correction is not None:
        raise ValueError("vtrace corrects for the behaviour policy already: a correction would do so twice")
    if "replay" in names and (choice.loss.single or choice.perception):
        raise ValueError("replayed episodes need a ratio to correct them, and have no masked scores (perception)")
