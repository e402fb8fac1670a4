"""Supervised learning on the environment's own expert: the cold start of an agent."""

from __future__ import annotations

from agentrl_jax import objectives, parts, stages, surrogates
from agentrl_jax.algorithm import Algorithm, Tools
from agentrl_jax.types import Array, PyTree, Trajectory


def _expert_rollout(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
    del hyper
    return memory, tools.roll(key, expert=True)


def behavior_cloning(
    name: str = "behavior_cloning", *, aggregation: str = "token-mean", norm: float | None = None
) -> Algorithm:
    """``-log pi`` of the expert's tokens, observations masked, through the same token stream as sampling."""
    joined = parts.join([parts.Part("scores", stages.score_policy())], teacher=True)
    return Algorithm(
        name=name,
        prepare=joined.prepare,
        weigh=objectives.weigh_tokens(aggregation, norm=norm),
        loss=objectives.token_objective(surrogates.likelihood),
        hyper={},
        needs=frozenset({"expert"}),
        init=joined.init,
        collect=_expert_rollout,
    )
