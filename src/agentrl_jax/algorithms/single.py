"""Presets that judge an episode by itself or by a critic: REINFORCE, PPO and what came of them."""

from __future__ import annotations

from agentrl_jax.algorithms.card import Preset

_SEQUENCE = {"aggregation": "seq-mean-token-sum", "ratio": "none", "clip": "none"}
_DAPO = {"eps_high": 0.28, "aggregation": "token-mean"}
_PPO = {"advantage": "gae", "shaping": ("whiten",), "kl_in": "reward"}

SINGLE: dict[str, Preset] = {
    # REINFORCE and its descendants
    "reinforce": Preset(
        "Simple Statistical Gradient-Following Algorithms",
        "Williams, 1992",
        {"advantage": "returns", **_SEQUENCE},
        about="The token sum keeps the estimator unbiased: a mean would weigh episodes by their length.",
    ),
    "reinforce_plus_plus": Preset(
        "REINFORCE++",
        "Hu et al., 2025, arXiv 2501.03262",
        {"advantage": "returns", "baseline": "none", "shaping": ("whiten",), "kl": "k1", "kl_in": "reward"},
    ),
    "reinforce_plus_plus_baseline": Preset(
        "REINFORCE++",
        "Hu et al., 2025, arXiv 2501.03262",
        {"advantage": "group", "scale": "none", "shaping": ("whiten",), "kl": "k2"},
        "A group of one gets 0 before whitening (verl: its raw return).",
    ),
    "rloo": Preset(
        "Back to Basics",
        "Ahmadian et al., 2024, arXiv 2402.14740",
        {"advantage": "leave_one_out", "kl_in": "reward", **_SEQUENCE},
        about="With ratio='product', clip='ppo' and aggregation='seq-mean-token-mean' it is TRL's form for "
        "several updates a step.",
        deviates="The KL in the reward (.05 in TRL) is off by default.",
    ),
    "remax": Preset(
        "ReMax",
        "Li et al., 2023, arXiv 2310.10505",
        {"collect": "greedy_baseline", "advantage": "subtract_baseline", "ratio": "none", "clip": "none"},
        deviates="The official code's KL in the reward is off by default.",
    ),
    "raft": Preset(
        "RAFT: Reward rAnked FineTuning",
        "Dong et al., 2023, arXiv 2304.06767",
        {"filters": ("best_of_group",), "advantage": "ones", "ratio": "none", "clip": "none"},
        "One round a step. A group whose best is the worst of the batch teaches nothing and is dropped.",
    ),
    "awr": Preset(
        "Advantage-Weighted Regression",
        "Peng et al., 2019, arXiv 1910.00177",
        {"advantage": "group", "scale": "none", "ratio": "none", "clip": "exponential"},
        "The group's mean stands for the critic; the constants are unconfirmed.",
    ),
    "opo": Preset(
        "On-Policy RL with Optimal Reward Baseline",
        "Hao et al., 2025, arXiv 2505.23585",
        {"advantage": "length_weighted", "ratio": "none", "clip": "none"},
    ),
    "gpg": Preset(
        "GPG",
        "Chu et al., 2025, arXiv 2504.02546",
        {"advantage": "gpg", "ratio": "none", "clip": "none"},
        "The factor counts members of groups that differ, as the paper means; verl counts non-zero rewards.",
    ),
    # PPO
    "ppo": Preset("Proximal Policy Optimization", "Schulman et al., 2017, arXiv 1707.06347", _PPO),
    "vapo": Preset(
        "VAPO",
        "Yue et al., 2025, arXiv 2504.05118",
        {"advantage": "vapo_gae", "imitation": "positive", **_DAPO},
        "lambda is clamped to [0, 1]. Value pre-training is a run of its own. The survey's gloss (adaptive KL) is "
        "wrong: there is none.",
    ),
    "lite_ppo": Preset(
        "Tricks or Traps",
        "Liu et al., 2025, arXiv 2508.08221",
        {"advantage": "group", "scale": "batch"},
        about="Mean of the group, deviation of the batch, mean over tokens; no critic.",
    ),
    "pf_ppo": Preset(
        "Policy Filtration for RLHF",
        "Shen and Zhang, 2024, arXiv 2409.06957",
        {**_PPO, "filters": ("policy_filtration",)},
        "The weights are verl's. It needs a reward that is an estimate (envs.noisy_reward): an exact one is refused.",
    ),
    "vine_ppo": Preset(
        "VinePPO",
        "Kazemnejad et al., 2024, arXiv 2410.01679",
        {"collect": "vine", "advantage": "vine_advantage", "shaping": ("whiten",)},
        "Steps are turns; 4 continuations a step, not 9; the KL term of the paper (1e-4) is off by default.",
    ),
    "bilevel_ppo": Preset(
        "VAGEN", "Wang et al., 2025, arXiv 2510.16907", {"advantage": "bilevel_gae", "shaping": ("whiten",)}
    ),
    "turn_ppo": Preset(
        "VAGEN (turn-wise)",
        "Wang et al., 2025, arXiv 2510.16907",
        {"advantage": "turn_gae", "shaping": ("whiten",)},
        "Whitened over all loss tokens, not turn ends alone.",
    ),
    "impala": Preset("IMPALA", "Espeholt et al., 2018, arXiv 1802.01561", {"advantage": "vtrace", "clip": "none"}),
}
"""By name."""
