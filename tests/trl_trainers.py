"""TRL's side of ``test_parity_trl``: its losses, in its own code, on numbers in place of models.

A loss of TRL is a method of a trainer whose constructor wants a model, a tokenizer and a data set. ``bare`` leaves the
constructor out and sets the attributes that the method reads; what would run a model gives the test's tensors back.
No formula stands here.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import accelerate
import numpy as np
import torch

torch.set_num_threads(1)  # The tensors are tiny: threads would only wait for each other.

GRPO, GMPO = "trainer.grpo_trainer.GRPOTrainer", "experimental.gmpo.gmpo_trainer.GMPOTrainer"
RLOO, DPO = "trainer.rloo_trainer.RLOOTrainer", "trainer.dpo_trainer.DPOTrainer"
KTO, SFT = "trainer.kto_trainer.KTOTrainer", "trainer.sft_trainer.SFTTrainer"
REWARD, ONLINE = "trainer.reward_trainer.RewardTrainer", "experimental.online_dpo.online_dpo_trainer.OnlineDPOTrainer"
ORPO, CPO = "experimental.orpo.orpo_trainer.ORPOTrainer", "experimental.cpo.cpo_trainer.CPOTrainer"
GKD = "experimental.gkd.gkd_trainer.GKDTrainer"


class Rows(NamedTuple):
    """A ragged batch: ``logp``, ``old``, ``ref``, ``behaviour``, ``entropy`` ``[B, T]``, ``adv`` ``[B]``;
    ``completion`` (what follows the prompt) and ``mask`` (what of it the agent wrote) ``bool[B, T]``."""

    logp: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    behaviour: np.ndarray
    entropy: np.ndarray
    adv: np.ndarray
    completion: np.ndarray
    mask: np.ndarray


class Found(NamedTuple):
    """A loss, its gradients by what was given, and the means that TRL logs."""

    loss: float
    grads: tuple[np.ndarray, ...]
    metrics: dict[str, float]


@functools.cache
def get(path: str) -> Any:
    """A class or a function of TRL."""
    module, name = path.rsplit(".", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.{module}"), name)


@functools.cache
def _accelerator() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True)


def bare(path: str, args: dict[str, Any], **attributes: Any) -> Any:
    """A trainer in training mode, on one process, without accumulation, with ``attributes`` and ``args``."""
    trainer = object.__new__(get(path))
    common = {
        "accelerator": _accelerator(), "model": _model(), "ref_model": _model(), "args": SimpleNamespace(**args),
        "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1, "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    for name, value in (common | attributes).items():
        setattr(trainer, name, value)
    return trainer


def _model() -> SimpleNamespace:
    return SimpleNamespace(training=True, is_gradient_checkpointing=False, train=lambda: None)


def leaf(x: np.ndarray) -> torch.Tensor:
    """The array under gradient."""
    return torch.tensor(x, dtype=torch.float32, requires_grad=True)


def tensor(x: np.ndarray) -> torch.Tensor:
    """The array in float32."""
    return torch.tensor(x, dtype=torch.float32)


def whole(x: np.ndarray) -> torch.Tensor:
    """The array of integers, as TRL's masks are."""
    return torch.tensor(np.asarray(x, np.int64))


def _gradient(loss: torch.Tensor, *leaves: torch.Tensor) -> Found:
    loss.backward()
    return Found(loss.item(), tuple(np.zeros(x.shape) if x.grad is None else x.grad.numpy() for x in leaves), {})


def _found(trainer: Any, loss: torch.Tensor, *leaves: torch.Tensor) -> Found:
    metrics = {k: float(v[-1]) for k, v in trainer._metrics["train"].items()}
    return _gradient(loss, *leaves)._replace(metrics=metrics)


# Losses of tokens


_TOKEN_ARGS = {
    "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
}  # fmt: skip
_TOKEN = {
    "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
    "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
    "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False, "max_completion_length": 16,
}  # fmt: skip


def token_trainer(rows: Rows, path: str = GRPO, **settings: Any) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """A trainer of the GRPO family that finds the rows' numbers, and the leaves: log-probabilities and entropies.

    ``settings`` go where TRL keeps them, among the trainer's attributes or its arguments.
    """
    leaves = leaf(rows.logp), leaf(rows.entropy)
    args = _TOKEN_ARGS | {k: v for k, v in settings.items() if k in _TOKEN_ARGS or k.startswith("entropy_coef_")}
    own = _TOKEN | {k: v for k, v in settings.items() if k not in args}
    if "entropy_target" in settings:
        args["entropy_target"] = own.pop("entropy_target")
    return bare(path, args, **own, _get_per_token_logps_and_entropies=lambda *_, **__: (*leaves, None)), leaves


def token_inputs(rows: Rows) -> dict[str, torch.Tensor]:
    """What a step of the GRPO family is given."""
    prompt = torch.ones((rows.mask.shape[0], 2), dtype=torch.long)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": whole(rows.completion),
        "completion_mask": whole(rows.completion), "tool_mask": whole(rows.mask | ~rows.completion),
        "advantages": tensor(rows.adv), "old_per_token_logps": tensor(rows.old),
        "ref_per_token_logps": tensor(rows.ref), "sampling_per_token_logps": tensor(rows.behaviour),
        "num_items_in_batch": whole(rows.mask).sum(),
    }  # fmt: skip


def token_loss(rows: Rows, path: str = GRPO, inputs: dict[str, torch.Tensor] | None = None, **settings: Any) -> Found:
    """The loss of a trainer of the GRPO family, and its gradients by log-probabilities and entropies."""
    trainer, leaves = token_trainer(rows, path, **settings)
    return _found(trainer, trainer._compute_loss(None, token_inputs(rows) | (inputs or {})), *leaves)


def rloo_loss(rows: Rows, **settings: Any) -> Found:
    """RLOO's; it knows no tool mask, so that every token of a completion counts."""
    old = np.where(rows.completion, rows.old, 0.0).sum(1)
    return token_loss(rows, RLOO, {"old_logps": tensor(old)}, **settings)


# What a batch is given before its loss


def collected(rows: Rows, rewards: np.ndarray, path: str = GRPO, **settings: Any) -> dict[str, torch.Tensor]:
    """The inputs of a step that TRL makes of what was sampled: advantages, and weights for vLLM's probabilities.

    ``rewards`` ``[B, R]``, one column a reward function; NaN where it gave none.
    """
    count = rewards.shape[1]
    lengths = rows.completion.sum(1)
    lists = lambda x: [list(map(float, r[:n])) for r, n in zip(x, lengths, strict=True)]  # noqa: E731
    ids = [[1] * int(n) for n in lengths]
    tools = [[int(x) for x in r[:n]] for r, n in zip(rows.mask, lengths, strict=True)]
    texts = ["" for _ in ids]
    reply = ([[1, 1]] * len(ids), ids, tools, texts, lists(rows.behaviour), {}, None, None)
    own = {
        "environment_factories": None, "environments": None, "tools": None, "pad_to_multiple_of": None,
        "mask_truncated_completions": False, "num_iterations": 1, "beta": 0.0, "use_vllm": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0), "num_generations": 4, "reward_weights": torch.ones(count),
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "reward_funcs": [None] * count,
        "reward_func_names": [f"r{i}" for i in range(count)], "log_multimodal": False, "_pending_extra_logs": {},
        "_pending_metrics": {}, "reward_clip_range": None, "normalize_advantages": False,
        "_logs": {k: defaultdict(list) if k in ("rewards", "extra") else [] for k in _LOGS},
        "_generate": lambda _: reply[:2] + reply[3:4] if path == RLOO else reply,
        "_calculate_rewards": lambda *_: tensor(rewards),
    }  # fmt: skip
    args = {
        "per_device_train_batch_size": len(ids), "gradient_accumulation_steps": 1, "steps_per_generation": 1,
        "gradient_checkpointing_kwargs": None,
    }  # fmt: skip
    trainer = bare(path, args, **(own | settings))
    scores = lambda model: tensor(rows.ref if model is trainer.ref_model else rows.old)  # noqa: E731
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (scores(model), None, None)
    return trainer._generate_and_score_completions([{"prompt": ""} for _ in ids])


_LOGS = ("prompt", "completion", "rewards", "advantages", "extra")


# Losses of sequences


def _fused(*logp: torch.Tensor):
    """A model with TRL's fused head, which gives 0 where there is no label. Ids of i are for the i-th tensor."""

    def model(*, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        on = labels[:, 1:] != -100
        log_probs = torch.where(on, logp[int(input_ids[0, 0])], 0.0)
        none = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=none, mean_logits=none, is_top1=on, label_mask=on)

    return model


def _prompted(mask: np.ndarray, ids: int = 0) -> dict[str, torch.Tensor]:
    """Inputs with one token of prompt in front of the masked ones."""
    count, width = mask.shape
    completion = whole(np.concatenate([np.zeros((count, 1)), mask], 1))
    every = torch.ones((count, width + 1), dtype=torch.long)
    return {"input_ids": every * ids, "attention_mask": every, "completion_mask": completion}


def dpo_loss(rows: Rows, *kinds: str, weights: tuple[float, ...] = (1.0,), **settings: Any) -> Found:
    """The loss types ``kinds``, weighted, of pairs: the first half of the rows chosen, the second rejected."""
    own = {
        "loss_types": list(kinds), "loss_weights": list(weights), "beta": 0.1, "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl", "ld_alpha": None, "precompute_ref_logps": False, "use_weighting": False,
        "ref_model": _fused(tensor(rows.ref)),
    }  # fmt: skip
    logp = leaf(rows.logp)
    trainer = bare(DPO, {"gradient_checkpointing_kwargs": None}, **(own | settings))
    return _found(trainer, trainer._compute_loss(_fused(logp), _prompted(rows.mask), False), logp)


def kto_loss(rows: Rows, other: Rows, desirable: np.ndarray, **settings: Any) -> Found:
    """KTO of the rows; ``other`` are the mismatched pairs of its reference point."""
    own = {
        "loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "calculate_KL": True,
        "precompute_ref_logps": False, "ref_model": _fused(tensor(rows.ref), tensor(other.ref)),
    }  # fmt: skip
    logp = leaf(rows.logp)
    trainer = bare(KTO, {"gradient_checkpointing_kwargs": None}, **(own | settings))
    inputs = _prompted(rows.mask) | {f"KL_{k}": v for k, v in _prompted(other.mask, 1).items()}
    inputs["label"] = torch.tensor(desirable)
    return _found(trainer, trainer._compute_loss(_fused(logp, tensor(other.logp)), inputs, False), logp)


def sft_loss(rows: Rows, kind: str) -> Found:
    """Supervised learning of every written token."""
    logp = leaf(rows.logp)
    args = {"loss_type": kind, "average_tokens_across_devices": False}
    trainer = bare(SFT, args, compute_loss_func=None, label_smoother=None)
    inputs = _prompted(rows.mask)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    return _found(trainer, trainer.compute_loss(_fused(logp), inputs), logp)


def reward_loss(reward: np.ndarray, margin: np.ndarray | None, centre: float | None) -> Found:
    """A reward model's loss on ``reward`` ``[2 P]``, the chosen first."""
    logits = leaf(reward[:, None])
    trainer = bare(REWARD, {"center_rewards_coefficient": centre})
    inputs = _prompted(np.ones((len(reward), 1))) | ({} if margin is None else {"margin": tensor(margin)})
    return _found(trainer, trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs), logits)


class Texts(NamedTuple):
    """Pairs as logits: ``logits`` ``[2 P, L, V]``, the chosen first; ``ids``, ``attention`` and ``response``
    ``[2 P, L]`` (a prompt stands in front of the response, padding behind it)."""

    logits: np.ndarray
    ids: np.ndarray
    attention: np.ndarray
    response: np.ndarray


def logits_loss(texts: Texts, path: str, **settings: Any) -> Found:
    """CPO's, SimPO's or ORPO's loss, and its gradient by the logits."""
    own = {
        "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0, "beta": 0.1, "loss_type": "sigmoid",
        "label_smoothing": 0.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5, "alpha": 0.0,
    }  # fmt: skip
    logits, half = leaf(texts.logits), len(texts.ids) // 2
    labels = np.where(texts.response, texts.ids, -100)
    parts = {"input_ids": texts.ids, "attention_mask": texts.attention, "labels": labels}
    sides = {"chosen": slice(half), "rejected": slice(half, None)}
    batch = {f"{side}_{k}": whole(v[rows]) for side, rows in sides.items() for k, v in parts.items()}
    trainer = bare(path, {}, **(own | settings))
    loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), batch)
    return _found(trainer, loss, logits)


def online_loss(rows: Rows, rewards: np.ndarray, kind: str, beta: float) -> Found:
    """Online DPO's step: row i and row i + B / 2 answer prompt i, the better paid is chosen."""
    args = {
        "use_vllm": False, "missing_eos_penalty": None, "loss_type": kind, "torch_empty_cache_steps": None,
        "optim": "adamw_torch", "n_gpu": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    logp, half = leaf(rows.logp), len(rows.logp) // 2
    ids = whole(rows.mask)
    own = {
        "_beta": beta, "eos_token_ids": [1], "reward_funcs": [None], "stats": defaultdict(list),
        "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        "_generate": lambda *_: (ids[:, :1], ids[:, :1], ids, ids, None),
        "_calculate_rewards_from_functions": lambda **_: tensor(rewards),
    }  # fmt: skip
    trainer = bare(ONLINE, args, **own)
    trainer._forward = lambda model, *_: tensor(rows.ref) if model is trainer.ref_model else logp
    loss = trainer.training_step(trainer.model, {"prompt": [""] * half})
    assert logp.grad is not None
    return Found(loss.item(), (logp.grad.numpy(),), {})


# Pure functions


def entropies(logits: np.ndarray, weight: np.ndarray) -> Found:
    """The weighted sum of the rows' entropies."""
    x = leaf(logits)
    return _gradient((get("trainer.utils.entropy_from_logits")(x) * tensor(weight)).sum(), x)


def divergence(logits: np.ndarray, teacher: np.ndarray) -> Found:
    """GKD's ``KL(student || teacher)``, a mean over rows."""
    x = leaf(logits)
    return _gradient(get(GKD).generalized_jsd_loss(x, tensor(teacher), beta=1), x)


def overlong(lengths: list[int], limit: int, cache: int) -> list[float]:
    """DAPO's soft punishment of responses of these lengths."""
    return get("rewards.other_rewards.get_soft_overlong_punishment")(limit, cache)([[0] * n for n in lengths])
