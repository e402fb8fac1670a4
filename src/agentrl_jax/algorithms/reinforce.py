"""Critic-free policy gradients: REINFORCE with a baseline, and RLOO."""

from __future__ import annotations

import jax.numpy as jnp

from agentrl_jax import groups, objectives, stages
from agentrl_jax.algorithm import Algorithm, Shape
from agentrl_jax.types import Array


def reinforce(
    *,
    discount: float = 1.0,
    entropy_coef: float = 0.0,
    baseline: str = "ema",
    aggregation: str = "seq-mean-token-sum",
    norm: float | None = None,
) -> Algorithm:
    """``-(G_t - b) log pi``, with the return to go and a running mean of past returns as the baseline.

    One update a step: nothing corrects for episodes of an earlier policy.
    Source: Williams, 1992. The token sum keeps the estimator unbiased: a mean would weigh episodes by their length.
    """

    def init(key: Array, shape: Shape) -> tuple[Array, Array] | tuple[()]:
        del key, shape
        return (jnp.zeros(()), jnp.zeros(())) if baseline == "ema" else ()

    return Algorithm(
        name="reinforce",
        prepare=stages.chain(stages.return_to_go(baseline), stages.score_policy()),
        weigh=objectives.weigh_tokens(aggregation, norm=norm),
        loss=objectives.token_objective(objectives.policy_gradient),
        hyper={"discount": discount, "entropy_coef": entropy_coef},
        needs=frozenset({"single"}),
        init=init,
    )


def rloo(
    *,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    aggregation: str = "seq-mean-token-sum",
    norm: float | None = None,
) -> Algorithm:
    """``A_i = R_i - mean of the other members' returns``; with ``kl_coef`` the reward carries ``-kl_coef * k1`` per
    token.

    One update a step: nothing corrects for episodes of an earlier policy.
    Source: Ahmadian et al., 2024, arXiv 2402.14740 (estimator: Kool et al., 2019).
    """
    reference = kl_coef > 0
    scoring = [stages.score_policy(always=reference)]
    if reference:
        scoring += [stages.score_reference(), stages.kl_in_reward()]
    return Algorithm(
        name="rloo",
        prepare=stages.chain(*scoring, stages.group_advantage(groups.leave_one_out)),
        weigh=objectives.weigh_tokens(aggregation, norm=norm),
        loss=objectives.token_objective(objectives.policy_gradient),
        hyper={"entropy_coef": entropy_coef} | ({"kl_coef": kl_coef} if reference else {}),
        needs=frozenset({"group", "single"} | ({"reference"} if reference else set())),
    )
