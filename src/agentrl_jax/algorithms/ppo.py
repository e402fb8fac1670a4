"""Proximal policy optimisation with a value head."""

from __future__ import annotations

from agentrl_jax import objectives, stages
from agentrl_jax.algorithm import Algorithm


def ppo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    discount: float = 1.0,
    lambda_: float = 0.95,
    value_coef: float = 0.5,
    value_eps: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    whiten: bool = True,
    aggregation: str = "token-mean",
    norm: float | None = None,
) -> Algorithm:
    """Clipped surrogate with GAE over written tokens, a clipped value loss, and ``-kl_coef * k1`` in the reward.

    Source: Schulman et al., 2017, arXiv 1707.06347; GAE: 2015, arXiv 1506.02438.
    """
    reference = kl_coef > 0
    chain = [stages.score_policy(always=True)]
    chain += [stages.score_reference(), stages.kl_in_reward()] if reference else []
    chain += [stages.gae()] + ([stages.whiten()] if whiten else [])
    return Algorithm(
        name="ppo",
        prepare=stages.chain(*chain),
        weigh=objectives.weigh_tokens(aggregation, norm=norm),
        loss=objectives.token_objective(objectives.ppo_clip, critic=True),
        hyper={
            "eps_low": eps_low, "eps_high": eps_high, "discount": discount, "lambda_": lambda_,
            "value_coef": value_coef, "value_eps": value_eps, "entropy_coef": entropy_coef,
        } | ({"kl_coef": kl_coef} if reference else {}),
        needs=frozenset({"critic"} | ({"reference"} if reference else set())),
    )  # fmt: skip
