"""The survey's algorithms as data: what is composed, where it is from, and where this deviates from the paper.

A preset is a few keywords of ``compose``, ``prefer`` or ``unpaired``; what it does not say is their default. Where the
survey's one-line gloss contradicts the paper, the paper is followed.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.compose import compose
from agentrl_jax.algorithms.preferences import prefer, unpaired
from agentrl_jax.algorithms.supervised import behavior_cloning


class Preset(NamedTuple):
    """A named algorithm.

    Attributes:
      title: of the paper.
      source: authors, year, arXiv id.
      options: keywords of ``build``.
      deviates: what differs from the paper here, and why; empty where nothing does.
      build: the function that makes the ``Algorithm``.
      about: what to know of it that its ingredients do not say.
    """

    title: str
    source: str
    options: dict[str, Any]
    deviates: str = ""
    build: Any = compose
    about: str = ""


_SEQUENCE = {"aggregation": "seq-mean-token-sum", "ratio": "none", "clip": "none"}
_GRPO = {"advantage": "group", "aggregation": "seq-mean-token-mean"}
_MIXED = {
    "advantage": "group", "scale": "none", "clip": "none", "aggregation": "seq-mean-token-sum-norm", "norm": 64.0,
}  # fmt: skip
_DAPO = {"eps_high": 0.28, "aggregation": "token-mean"}
_PPO = {"advantage": "gae", "shaping": ("whiten",), "kl_in": "reward"}

PRESETS: dict[str, Preset] = {
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
    # GRPO and its variants
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
    # Preferences
    "online_dpo": Preset(
        "Direct Preference Optimization",
        "Rafailov et al., 2023, arXiv 2305.18290; online: Guo et al., 2024, 2402.04792",
        {"loss": "dpo"},
        build=prefer,
        deviates="Best against worst of a group; the online paper compares two samples.",
    ),
    "beta_dpo": Preset(
        "beta-DPO",
        "Wu et al., 2024, arXiv 2407.08639",
        {"loss": "dynamic"},
        "The gap is without beta, as in the code.",
        prefer,
    ),
    "ipo": Preset(
        "A General Theoretical Paradigm",
        "Azar et al., 2023, arXiv 2310.12036",
        {"loss": "ipo"},
        "On means over tokens, which the authors confirmed for language models; loss='ipo-sum' is the printed formula.",
        prefer,
    ),
    "kto": Preset(
        "KTO: Model Alignment as Prospect Theoretic Optimization",
        "Ethayarajh et al., 2024, arXiv 2402.01306",
        {},
        build=unpaired,
        about="Kahneman-Tversky optimisation; the survey's expansion of the name is wrong.",
    ),
    "simpo": Preset("SimPO", "Meng, Xia and Chen, 2024, arXiv 2405.14734", {"loss": "simpo"}, build=prefer),
    "orpo": Preset(
        "ORPO",
        "Hong, Lee and Thorne, 2024, arXiv 2403.07691",
        {"loss": "orpo"},
        build=prefer,
        about="Odds ratio; the survey's expansion of the name is wrong. The likelihood is of the response alone.",
    ),
    "cpo": Preset("CPO", "Xu et al., 2024, arXiv 2401.08417", {"loss": "cpo"}, build=prefer),
    "lcpo": Preset(
        "Pruning Long Chain-of-Thought via Small-Scale Preference Optimization",
        "Hong et al., 2025, arXiv 2508.10164",
        {"loss": "lcpo", "pairs": "shortest_against_longest"},
        "From a secondary source.",
        prefer,
    ),
    "step_dpo": Preset(
        "Step-DPO",
        "Lai et al., 2024, arXiv 2406.18629",
        {"loss": "dpo", "beta": 0.4, "pairs": "step_pairs"},
        "Steps are turns, judged by how their episodes end.",
        prefer,
    ),
    "dmpo": Preset(
        "Direct Multi-Turn Preference Optimization",
        "Shi et al., 2024, arXiv 2406.14868",
        {"loss": "dmpo"},
        build=prefer,
    ),
    "iterative_rpo": Preset(
        "Iterative Reasoning Preference Optimization",
        "Pang et al., 2024, arXiv 2404.19733",
        {"loss": "dpo-nll"},
        "One round a step, against a fixed reference.",
        prefer,
    ),
    # Supervised
    "behavior_cloning": Preset(
        "ALVINN",
        "Pomerleau, 1988",
        {},
        build=behavior_cloning,
        about="The cold start: the expert's tokens, by likelihood.",
    ),
}
"""By name; ``make`` builds them, ``describe`` prints them."""


def preset(name: str) -> Preset:
    """A preset by name.

    Raises:
      ValueError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def make(name: str, **options: Any) -> Algorithm:
    """A preset by name, with any of its keywords changed.

    Raises:
      ValueError: an unknown preset or option, and the message lists what there is; a value of another type than the
        option's, a number out of range, a choice that does not exist, ingredients that do not go together.
    """
    found = preset(name)
    if found.build is not compose:
        known = tuple(inspect.signature(found.build).parameters)
        return found.build(name, **_checked(name, found, known, found.options | options))
    structure = set(inspect.signature(compose).parameters)
    own = {key: value for key, value in found.options.items() if key in structure}
    if "aggregation" in options and "norm" not in options:
        own.pop("norm", None)
    # A number of the preset goes with its ingredient: where that was replaced, nothing reads it.
    rest = {key: value for key, value in found.options.items() if key not in structure}
    return compose(name, **(own | options), defaults=rest)


def _checked(name: str, found: Preset, known: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    if "options" not in known:
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"{name} has no option {unknown}; it has: {', '.join(k for k in known if k != 'name')}")
    return options
