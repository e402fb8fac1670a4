"""Presets that learn from comparisons: DPO and its variants."""

from __future__ import annotations

from agentrl_jax.algorithms.card import Preset
from agentrl_jax.algorithms.preferences import prefer, unpaired

_ONLINE = "Trained online, on the policy's own best against worst episode of a group, not offline on given pairs."

COMPARED: dict[str, Preset] = {
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
        f"{_ONLINE} The gap is without beta, as in the code.",
        prefer,
    ),
    "ipo": Preset(
        "A General Theoretical Paradigm",
        "Azar et al., 2023, arXiv 2310.12036",
        {"loss": "ipo"},
        f"{_ONLINE} On means over tokens, which the authors confirmed for language models; loss='ipo-sum' is the "
        "printed formula.",
        prefer,
    ),
    "kto": Preset(
        "KTO: Model Alignment as Prospect Theoretic Optimization",
        "Ethayarajh et al., 2024, arXiv 2402.01306",
        {},
        "Trained online, on the policy's own episodes, desirable where the return is above desirable_above, not "
        "offline on given labels.",
        unpaired,
        about="Kahneman-Tversky optimisation; the survey's expansion of the name is wrong.",
    ),
    "simpo": Preset("SimPO", "Meng, Xia and Chen, 2024, arXiv 2405.14734", {"loss": "simpo"}, _ONLINE, prefer),
    "orpo": Preset(
        "ORPO",
        "Hong, Lee and Thorne, 2024, arXiv 2403.07691",
        {"loss": "orpo"},
        _ONLINE,
        prefer,
        about="Odds ratio; the survey's expansion of the name is wrong. The likelihood is of the response alone.",
    ),
    "cpo": Preset("CPO", "Xu et al., 2024, arXiv 2401.08417", {"loss": "cpo"}, _ONLINE, prefer),
    "lcpo": Preset(
        "Pruning Long Chain-of-Thought via Small-Scale Preference Optimization",
        "Hong et al., 2025, arXiv 2508.10164",
        {"loss": "lcpo", "pairs": "shortest_against_longest"},
        "Trained online, on the policy's own shortest against longest correct episode of a group, not "
        "offline on pairs collected beforehand. From a secondary source.",
        prefer,
    ),
    "step_dpo": Preset(
        "Step-DPO",
        "Lai et al., 2024, arXiv 2406.18629",
        {"loss": "dpo", "beta": 0.4, "pairs": "step_pairs"},
        "Trained online, on pairs branched in the step, not offline on pairs collected beforehand. Steps "
        "are turns, judged by how their episodes end.",
        prefer,
    ),
    "sdpo": Preset(
        "SDPO: Segment-Level Direct Preference Optimization",
        "Kong et al., 2025, arXiv 2501.01821",
        {"loss": "dpo", "pairs": "segment_pairs"},
        "Trained online, on pairs branched in the step, not offline on pairs collected beforehand. The "
        "turn where the segments part is drawn, and returns tell the better one; in the paper a language model finds "
        "the wrong turn and chooses the segment.",
        prefer,
    ),
    "dmpo": Preset(
        "Direct Multi-Turn Preference Optimization",
        "Shi et al., 2024, arXiv 2406.14868",
        {"loss": "dmpo"},
        _ONLINE,
        prefer,
    ),
    "iterative_rpo": Preset(
        "Iterative Reasoning Preference Optimization",
        "Pang et al., 2024, arXiv 2404.19733",
        {"loss": "dpo-nll"},
        "One round a step, against a fixed reference, on the best against the worst episode of a group; in the paper a "
        "round samples pairs for the whole data set, trains on them, and begins the next with what came of it.",
        prefer,
    ),
}
"""By name."""
