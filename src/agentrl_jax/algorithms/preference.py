"""Preference optimisation on the agent's own trajectories."""

from __future__ import annotations

from agentrl_jax import objectives, stages
from agentrl_jax.algorithm import Algorithm


def online_dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Algorithm:
    """DPO on pairs sampled in this step: each group's best episode against its worst; ties are dropped.

    Source: Rafailov et al., 2023, arXiv 2305.18290; online pairs: Guo et al., 2024, arXiv 2402.04792.
    """
    return Algorithm(
        name="online_dpo",
        prepare=stages.chain(stages.best_against_worst(), stages.score_policy(), stages.score_reference()),
        weigh=objectives.weigh_pairs,
        loss=objectives.preference_objective,
        hyper={"beta": beta, "label_smoothing": label_smoothing},
        needs=frozenset({"reference", "pairs"}),
    )
