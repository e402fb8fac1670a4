"""Presets that judge an episode by its group: GRPO and its variants."""

from __future__ import annotations

from agentrl_jax.algorithms.card import Preset

_GRPO = {"advantage": "group", "aggregation": "seq-mean-token-mean"}
_MIXED = {
    "advantage": "group", "scale": "none", "clip": "none", "aggregation": "seq-mean-token-sum-norm", "norm": 64.0,
}  # fmt: skip
_DAPO = {"eps_high": 0.28, "aggregation": "token-mean"}

GROUPED: dict[str, Preset] = {
    "grpo": Preset("DeepSeekMath", "Shao et al., 2024, arXiv 2402.03300", _GRPO, "The KL term is off by default."),
    "dr_grpo": Preset(
        "Understanding R1-Zero-Like Training",
        "Liu et al., 2025, arXiv 2503.20783",
        {"advantage": "group", "scale": "none", "aggregation": "seq-mean-token-sum-norm", "norm": 64.0},
        "norm is the longest answer's tokens (3000 in the paper): set it with your max_tokens.",
    ),
    "dapo": Preset(
        "DAPO",
        "Yu et al., 2025, arXiv 2503.14476",
        {**_DAPO, "collect": "refill", "filters": ("varied",), "reward": ("soft_overlong",)},
        "Groups that stay alike after the last round are dropped; the paper samples on. Lengths count all "
        "tokens of a row.",
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization", "Zheng et al., 2025, arXiv 2507.18071", {**_GRPO, "ratio": "sequence"}
    ),
    "gspo_token": Preset(
        "Group Sequence Policy Optimization",
        "Zheng et al., 2025, arXiv 2507.18071",
        {**_GRPO, "ratio": "sequence-token"},
    ),
    "gmpo": Preset(
        "Geometric-Mean Policy Optimization", "Zhao et al., 2025, arXiv 2507.20673", {**_GRPO, "ratio": "geometric"}
    ),
    "cispo": Preset(
        "MiniMax-M1",
        "MiniMax, 2025, arXiv 2506.13585",
        {"clip": "cispo"},
        deviates="eps_high is DAPO's width; the paper tunes it.",
    ),
    "sapo": Preset(
        "Soft Adaptive Policy Optimization", "Gao et al., 2025, arXiv 2511.20347", {**_GRPO, "clip": "sapo"}
    ),
    "archer": Preset(
        "Asymmetric Importance Sampling Policy Optimization",
        "Wang et al., 2025, arXiv 2510.06062",
        {"clip": "asymmetric"},
        "The clip widths do not depend on a token's entropy here.",
        about="Also called ASPO; the survey's ASPO is another method.",
    ),
    "decoupled_ppo": Preset(
        "AReaL",
        "Fu et al., 2025, arXiv 2505.24298",
        {**_GRPO, "correction": "tis", "correction_high": 5.0},
        "GRPO's advantage in place of a critic's.",
    ),
    "pro_rl": Preset(
        "ProRL",
        "Liu et al., 2025, arXiv 2505.24864",
        {
            **_DAPO,
            "eps_high": 0.4,
            "collect": "refill",
            "filters": ("varied",),
            "kl": "k3",
            "finish": ("reset_reference",),
        },
        "The reference is reset every reset_every steps or beyond reset_kl, not by a validation set; constants are "
        "unconfirmed.",
    ),
    "pass_at_k": Preset("Pass@k Training", "Chen et al., 2025, arXiv 2508.10751", {"advantage": "pass_at_k"}),
    "pkpo": Preset(
        "Pass@K Policy Optimization",
        "Walder and Karkhanis, 2025, arXiv 2505.15201",
        {"advantage": "max_at_k"},
        "The weights are of a sum over the group, the aggregation a mean: smaller by its size. From a secondary "
        "source.",
    ),
    "gdpo": Preset("GDPO", "2026, arXiv 2601.05242", {"advantage": "gdpo"}, "Batch statistics count episodes."),
    "gigpo": Preset(
        "Group-in-Group Policy Optimization",
        "Feng et al., 2025, arXiv 2505.10978",
        {"advantage": "gigpo", "aggregation": "seq-mean-token-mean"},
        "Episode statistics count episodes (the code: steps). The KL (.01) is off by default. The penalty of "
        "invalid actions is "
        "reward=('malformed_penalty',).",
    ),
    "turn_grpo": Preset(
        "Turn-Level Credit Assignment",
        "Zeng et al., 2025, arXiv 2505.11821",
        {"advantage": "turn_relative"},
        "The paper's code has two turns; the form for K turns is ours, and equals it for two. Its KL is off by "
        "default.",
    ),
    "step_grpo": Preset(
        "R1-VL",
        "Zhang et al., 2025, arXiv 2503.12937",
        {**_GRPO, "reward": ("step_reward",)},
        "Key steps are the environment's own parts, not text matched against a reference solution.",
        about="GRPO plus a reward.",
    ),
    "posterior_grpo": Preset(
        "Posterior-GRPO",
        "Fan et al., 2025, arXiv 2508.05170",
        {**_GRPO, "reward": ("posterior_reward",)},
        "The quality of the process is an environment's part, not a trained judge; from a secondary source.",
        about="GRPO plus a reward.",
    ),
    "starpo": Preset(
        "RAGEN",
        "Wang et al., 2025, arXiv 2504.20073",
        {"advantage": "group"},
        about="GRPO on whole multi-turn episodes with a mean over tokens: what every preset here does.",
    ),
    "starpo_s": Preset(
        "RAGEN",
        "Wang et al., 2025, arXiv 2504.20073",
        {
            "advantage": "gae",
            "lambda_": 1.0,
            "shaping": ("whiten",),
            "filters": ("uncertain",),
            "eps_high": 0.28,
            "entropy_coef": 0.001,
        },
    ),
    "greso": Preset(
        "Act Only When It Pays",
        "Zheng et al., 2025, arXiv 2506.02177",
        {**_GRPO, "collect": "skip_settled", "pool": 1024},
        "Tasks come from a pool of fixed size; the number of rolls a step is fixed.",
    ),
    "srpo": Preset(
        "SRPO",
        "Zhang et al., 2025, arXiv 2504.14286",
        {"collect": "drop_solved", "pool": 1024, "filters": ("complete",)},
        "One stage; overlong episodes are dropped, where the paper gives them advantage 0; from a secondary source.",
    ),
    "dars": Preset(
        "Depth-Breadth Synergy in RLVR",
        "Yang et al., 2025, arXiv 2508.13755",
        {"advantage": "group", "scale": "none", "collect": "difficulty_rolls", "filters": ("varied",)},
        "Extra rolls come out of a fixed number of episodes, hardest tasks first.",
    ),
    "ghpo": Preset(
        "GHPO",
        "Liu et al., 2025, arXiv 2507.10628",
        {"collect": "hints"},
        "Hints are the teacher's first turns; the paper shows a share of the solution's characters.",
    ),
    "edge_grpo": Preset(
        "EDGE-GRPO",
        "Zhang et al., 2025, arXiv 2507.21848",
        {**_GRPO, "shaping": ("entropy_scaled",)},
        "Entropy over written tokens, clamped, without gradient. Guided error correction is left out; "
        "collect='hints' is the "
        "nearest to it.",
    ),
    "grpo_roc": Preset(
        "rStar2-Agent",
        "Shang et al., 2025, arXiv 2508.20722",
        {**_DAPO, "collect": "resample_correct", "draw": False},
        "Follows the official code where paper and code differ (draw=True: the paper's sampling).",
    ),
    "skywork_ssb": Preset(
        "Skywork R1V2",
        "Wang et al., 2025, arXiv 2504.16656",
        {**_GRPO, "replay": "replay", "capacity": 256},
        "The selective sample buffer alone; its rule and share are unconfirmed.",
    ),
    "luffy": Preset(
        "LUFFY",
        "Yan et al., 2025, arXiv 2504.14945",
        {"collect": "mixed_expert", "imitation": "luffy", **_MIXED},
        "The expert is the environment's scripted teacher. norm stands for the paper's constant width.",
    ),
    "rl_plus": Preset(
        "RL-PLUS",
        "Dong et al., 2025, arXiv 2508.00222",
        {"collect": "mixed_expert", "imitation": "rl-plus", **_MIXED, "entropy_coef": 0.001},
        "Formula, power and recipe from the official repository; norm stands for its constant width.",
    ),
    "chord": Preset(
        "On-Policy RL Meets Off-Policy Experts",
        "Zhang et al., 2025, arXiv 2508.11408",
        {
            "collect": "mixed_expert",
            "imitation": "chord",
            "advantage": "own_group",
            "mu": 0.9,
            "finish": ("anneal_imitation",),
        },
        "Expert episodes take places in the groups.",
    ),
    "chord_phi": Preset(
        "On-Policy RL Meets Off-Policy Experts",
        "Zhang et al., 2025, arXiv 2508.11408",
        {"collect": "mixed_expert", "imitation": "chord-phi", "advantage": "own_group"},
        "Expert episodes take places in the groups.",
    ),
    "papo": Preset(
        "Perception-Aware Policy Optimization",
        "Wang et al., 2025, arXiv 2507.06448",
        {**_GRPO, "perception": True},
        "Bytes of observations are masked in place of patches of an image; the divergence is bounded; no "
        "double-entropy term.",
    ),
    "aspo": Preset(
        "Understanding Tool-Integrated Reasoning",
        "Lin and Xu, 2025, arXiv 2508.19201",
        {"advantage": "group", "shaping": ("aspo_shaped",)},
        "Positions and lengths count written tokens; the constants are a third-party recipe's.",
    ),
    "ktae": Preset(
        "KTAE",
        "Sun et al., 2025, arXiv 2505.16826",
        {"advantage": "group", "shaping": ("ktae_shaped",)},
        "Without the optional term-frequency factor.",
    ),
    "entropy_advantage": Preset(
        "Reasoning with Exploration",
        "Cheng et al., 2025, arXiv 2506.14758",
        {"shaping": ("entropy_shaped",)},
        "From a third-party implementation.",
    ),
    "top_entropy": Preset(
        "Beyond the 80/20 Rule",
        "Wang et al., 2025, arXiv 2506.01939",
        {**_DAPO, "tokens": ("top_entropy",)},
        deviates="The paper's run is on all of DAPO; here with its clip and aggregation alone.",
    ),
    "clip_cov": Preset(
        "The Entropy Mechanism of RL",
        "Cui et al., 2025, arXiv 2505.22617",
        {"tokens": ("clip_cov",)},
        "Tokens are chosen once a step, before the first update.",
    ),
    "kl_cov": Preset(
        "The Entropy Mechanism of RL",
        "Cui et al., 2025, arXiv 2505.22617",
        {"tokens": ("kl_cov",), "clip": "kl-cov"},
        "Tokens are chosen once a step, before the first update.",
    ),
    "tree_po": Preset(
        "TreePO",
        "Li et al., 2025, arXiv 2508.17445",
        {"collect": "tree", "roots": 4, "advantage": "tree_advantage", "shaping": ("whiten",)},
        "Segments are turns, with one level of branches.",
    ),
    "arpo": Preset(
        "Agentic Reinforced Policy Optimization",
        "Dong et al., 2025, arXiv 2507.19849",
        {"collect": "tree", "roots": 4, "rule": "entropy", "advantage": "group"},
        "One level of branches. Attribution is soft; shaping=('shared_prefix',) makes it hard.",
    ),
}
"""By name."""
