"""Group-relative policy optimisation."""

from __future__ import annotations

from agentrl_jax import groups, objectives, stages
from agentrl_jax.algorithm import Algorithm
from agentrl_jax.checks import check_choice
from agentrl_jax.kl import ESTIMATORS


def grpo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    scale: str = "std",
    ddof: int = 1,
    kl: str = "k3",
    aggregation: str = "seq-mean-token-mean",
    norm: float | None = None,
) -> Algorithm:
    """``A_i = (R_i - mean) / (std + 1e-6)`` within the group, PPO's clip, each sequence averaged over its tokens.

    With ``kl_coef`` a term ``kl_coef * kl`` against the frozen reference enters the loss. ``scale="none"`` with
    ``aggregation="seq-mean-token-sum-norm"`` and ``norm=max_tokens`` is Dr.GRPO's estimator.
    Source: Shao et al., 2024, arXiv 2402.03300.
    """
    check_choice("kl", kl, ESTIMATORS)
    reference = kl_coef > 0
    score = [stages.score_policy(), *([stages.score_reference()] if reference else [])]
    return Algorithm(
        name="grpo",
        prepare=stages.chain(*score, stages.group_advantage(groups.group_relative, scale=scale, ddof=ddof)),
        weigh=objectives.weigh_tokens(aggregation, norm=norm),
        loss=objectives.token_objective(objectives.ppo_clip, kl=kl if reference else None),
        hyper={"eps_low": eps_low, "eps_high": eps_high, "entropy_coef": entropy_coef}
        | ({"kl_coef": kl_coef} if reference else {}),
        needs=frozenset({"group"} | ({"reference"} if reference else set())),
    )
