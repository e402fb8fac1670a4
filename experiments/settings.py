"""Every number and switch of a run in one table, and what can be said of it without building anything."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from agentrl_jax.models.config import DTYPES

SCHEDULES = ("constant", "linear", "cosine")
_SWITCHES = {"true": True, "yes": True, "false": False, "no": False}


def _flag(default: Any, help_: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_, **limits})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every flag of ``train.py``, with its default and help: ``low``, ``high`` and ``choices`` are what is allowed."""

    env: str = _flag("calculator", "Environment by name; an unknown one lists what there is.")
    tasks: str = _flag("", 'Train on your own questions: a JSONL file with one {"prompt": ..., "answer": ...} a line.')
    env_option: tuple[str, ...] = _flag((), "name=value: structure of the environment (max_turns=6). Repeatable.")
    env_params: tuple[str, ...] = _flag((), "name=value: difficulty of the environment (max_digits=4). Repeatable.")
    algorithm: str = _flag("grpo", "Algorithm of the RL phase by name; an unknown one lists what there is.")
    option: tuple[str, ...] = _flag((), "name=value: structure of the algorithm (scale=none). Repeatable.")
    hyper: tuple[str, ...] = _flag((), "name=value: any traced number of the RL phase (max_grad_norm=0.5). Repeatable.")

    name: str = _flag(
        "", "Name of the run, its folder under --root. Default: the first free <env>-<algorithm>-<number>."
    )
    root: str = _flag("runs", "Folder that holds the runs.")
    seed: int = _flag(0, "Root of all randomness.", low=0, high=2**32 - 1)
    resume: bool = _flag(
        False, "Go on with the run --name from its newest checkpoint, with its own settings; or start it."
    )

    supervised_steps: int = _flag(500, "Steps of the cold start on the environment's scripted teacher; 0: none.", low=0)
    steps: int = _flag(40, "Steps of the RL phase; 0: none.", low=0)
    supervised_episodes: int = _flag(64, "Episodes of a supervised step.", low=1)
    episodes: int = _flag(128, "Episodes of an RL step, a multiple of --group_size.", low=1)
    group_size: int = _flag(8, "Episodes that try the same task.", low=1)
    max_tokens: int = _flag(
        0, "Tokens an episode may have; 0: 80 for the calculator, else what the environment needs.", low=0
    )
    slots: int = _flag(0, "Episodes in play at once; 0: all of them.", low=0)
    segments: int = _flag(1, "Rows an episode may use where the environment restarts its context.", low=1)

    layers: int = _flag(2, "Blocks of the transformer.", low=1)
    width: int = _flag(128, "Width of its residual stream.", low=1)
    heads: int = _flag(8, "Query heads.", low=1)
    kv_heads: int = _flag(0, "Key and value heads; 0: as many as --heads.", low=0)
    mlp_width: int = _flag(384, "Inner width of its feed-forward; 0: four times --width.", low=0)
    rope_theta: float = _flag(
        100.0, "Base of its rotary frequencies: small for rows of a hundred tokens, 10000 for thousands.", low=1.0
    )
    tied: bool = _flag(True, "One matrix serves as embedding and output head.")
    value_head: str = _flag(
        "auto", "A head for values; auto: when the algorithm needs a critic.", choices=("auto", "yes", "no")
    )
    dtype: str = _flag("float32", "Of activations and cache; parameters stay float32.", choices=DTYPES)

    supervised_learning_rate: float = _flag(4e-3, "Peak step size of the cold start.", low=0.0)
    supervised_warmup: int = _flag(20, "Updates of its linear warm-up.", low=0)
    supervised_schedule: str = _flag("cosine", "Its schedule after the warm-up.", choices=SCHEDULES)
    learning_rate: float = _flag(2e-4, "Peak step size of RL.", low=0.0)
    warmup: int = _flag(3, "Updates of its linear warm-up.", low=0)
    schedule: str = _flag("linear", "Its schedule after the warm-up.", choices=SCHEDULES)
    epochs: int = _flag(1, "Passes of RL over the episodes of a step.", low=1)
    minibatches: int = _flag(1, "Optimiser updates a pass.", low=1)
    microbatches: int = _flag(
        0, "Pieces in which a gradient is computed, rows sorted by length; exact. 0: two, where that divides.", low=0
    )
    supervised_microbatches: int = _flag(0, "The same for the cold start.", low=0)
    widths: tuple[str, ...] = _flag(
        (), "Tokens: a static width below --max_tokens at which a piece may be computed. Repeatable. Default: two."
    )
    optimizer: str = _flag("adam", "Of both phases.", choices=("adam", "sgd"))

    temperature: float = _flag(1.0, "Of sampling, in RL and in the sampled evaluation.", low=0.0)
    discount: float | None = _flag(None, "Reward discount a token. Default: the algorithm's.", low=0.0, high=1.0)
    eps_low: float | None = _flag(None, "Lower clip width. Default: the algorithm's.", low=0.0)
    eps_high: float | None = _flag(None, "Upper clip width. Default: the algorithm's.", low=0.0)
    kl_coef: float | None = _flag(
        None, "KL penalty to the policy before RL; above 0 it is kept. Default: the algorithm's.", low=0.0
    )
    entropy_coef: float | None = _flag(None, "Entropy bonus. Default: the algorithm's.")

    held_out: float = _flag(
        0.1, "Share of tasks kept for evaluation; 0: evaluation plays training tasks.", low=0.0, high=0.99
    )
    eval_every: int = _flag(20, "RL steps between evaluations; 0: only before and after RL.", low=0)
    eval_problems: int = _flag(128, "Held-out tasks of an evaluation.", low=1)
    eval_samples: int = _flag(4, "Sampled tries of each task, beside the greedy one.", low=0)
    transcripts: int = _flag(3, "Episodes of each evaluation that go to transcripts.txt.", low=0)

    save_every: int = _flag(100, "Steps between checkpoints; every evaluation makes one too.", low=1)
    keep_last: int = _flag(3, "Checkpoints to keep, beside the best; -1: all.", low=-1)
    tensorboard: bool = _flag(True, "Write TensorBoard events.")
    progress: str = _flag(
        "auto",
        "Live display, plain lines, or none; auto: live on a terminal.",
        choices=("auto", "live", "plain", "off"),
    )
    compile_cache: str = _flag("", "Folder that keeps compiled programs for the next run; empty: none.")


# What may change when a run goes on: it moves no number of the training.
FREE = (
    "root",
    "name",
    "resume",
    "eval_every",
    "transcripts",
    "save_every",
    "keep_last",
    "tensorboard",
    "progress",
    "compile_cache",
)
NUMBERS = ("discount", "eps_low", "eps_high", "kl_coef", "entropy_coef")


def check_ranges(settings: Settings) -> None:
    """Refuses values outside the limits of the table.

    Raises:
      ValueError: naming the setting, its value and what is allowed.
    """
    for field in dataclasses.fields(settings):
        value, limits = getattr(settings, field.name), field.metadata
        if "choices" in limits and value not in limits["choices"]:
            raise ValueError(f"{field.name} must be one of {', '.join(limits['choices'])}, got {value!r}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
            if not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"{field.name} must be a finite number in [{low}, {high}], got {value}")
    if settings.keep_last == 0:
        raise ValueError("keep_last must be at least 1, or -1 to keep all, got 0")


def pairs(name: str, items: tuple[str, ...]) -> dict[str, Any]:
    """``("a=1", "b=x")`` as ``{"a": 1, "b": "x"}``: Python literals, yes, no, true and false, else strings.

    Raises:
      ValueError: an item without ``=``, or a name given twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key or not text:
            raise ValueError(f"--{name}={item}: expected name=value")
        if key in found:
            raise ValueError(f"--{name}: {key} is given twice")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found[key] = _SWITCHES.get(text.lower(), text)
    return found


def number(name: str, key: str, value: Any) -> Any:
    """``value``, when it is a finite number or a boolean.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return value
    raise ValueError(f"--{name}={key}={value}: {value!r} is not a finite number")


def plain(value: Any) -> Any:
    """Named tuples and dataclasses as dicts, arrays of one number as Python numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value


def differences(stored: Any, now: Any, where: str = "") -> list[str]:
    """Where two plain configurations differ: ``["model.layers was 2, is 3"]``."""
    if isinstance(stored, dict) and isinstance(now, dict):
        names = sorted(stored.keys() | now.keys())
        found = (differences(stored.get(n), now.get(n), f"{where}.{n}" if where else n) for n in names)
        return functools.reduce(list.__add__, found, [])
    return [] if stored == now else [f"{where} was {stored!r}, is {now!r}"]


def merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """The stored settings of a run, with those given now that may change; others must agree.

    Raises:
      ValueError: a setting that must not change does, or the stored ones are of another version; it is named.
    """
    known = {field.name for field in dataclasses.fields(Settings)}
    strange = sorted(set(stored) ^ known)
    if strange:
        raise ValueError(f"the run was started by another version of this program: setting {strange[0]!r} differs")
    changed = [name for name, value in given.items() if name not in FREE and stored[name] != value]
    if changed:
        name = changed[0]
        raise ValueError(
            f"--{name}={given[name]!r}, but the run was started with {stored[name]!r}: leave it out, or start a new run"
        )
    return Settings(**{**stored, **{name: value for name, value in given.items() if name in FREE}})
