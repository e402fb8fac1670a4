"""What a run is: every number and switch in one table, and what is built from them, checked before any compile."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from agentrl_jax import algorithms, codecs, envs, train
from agentrl_jax.algorithm import Algorithm, Hyper
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs import registry
from agentrl_jax.envs.base import Environment
from agentrl_jax.envs.splits import check_split
from agentrl_jax.envs.tasks_file import load_tasks
from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.models.config import DTYPES
from agentrl_jax.policy import Policy
from agentrl_jax.train import TrainConfig
from agentrl_jax.update import UpdateConfig

SUPERVISED, RL = "supervised", "rl"
SCHEDULES = ("constant", "linear", "cosine")
# Where an environment is better served by something else than the general rule.
MAX_TOKENS = {"calculator": 80}
ENV_PARAMS = {"calculator": {"teacher_wrong": 0.4, "teacher_guess": 0.4}}
# So many distinct tasks at any difficulty that counting them would only cost time.
PLENTY = ("calculator",)
CALLS = {SUPERVISED: 10, RL: 1}


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

    supervised_steps: int = _flag(300, "Steps of the cold start on the environment's scripted teacher; 0: none.", low=0)
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
    heads: int = _flag(4, "Query heads.", low=1)
    kv_heads: int = _flag(0, "Key and value heads; 0: as many as --heads.", low=0)
    mlp_width: int = _flag(384, "Inner width of its feed-forward; 0: four times --width.", low=0)
    tied: bool = _flag(True, "One matrix serves as embedding and output head.")
    value_head: str = _flag(
        "auto", "A head for values; auto: when the algorithm needs a critic.", choices=("auto", "yes", "no")
    )
    dtype: str = _flag("float32", "Of activations and cache; parameters stay float32.", choices=DTYPES)

    supervised_learning_rate: float = _flag(3e-3, "Peak step size of the cold start.", low=0.0)
    supervised_warmup: int = _flag(20, "Updates of its linear warm-up.", low=0)
    supervised_schedule: str = _flag("cosine", "Its schedule after the warm-up.", choices=SCHEDULES)
    learning_rate: float = _flag(5e-4, "Peak step size of RL.", low=0.0)
    warmup: int = _flag(0, "Updates of its linear warm-up.", low=0)
    schedule: str = _flag("constant", "Its schedule after the warm-up.", choices=SCHEDULES)
    epochs: int = _flag(1, "Passes of RL over the episodes of a step.", low=1)
    minibatches: int = _flag(1, "Optimiser updates a pass.", low=1)
    microbatches: int = _flag(1, "Pieces in which a gradient is computed, rows sorted by length; exact.", low=1)
    supervised_microbatches: int = _flag(1, "The same for the cold start.", low=1)
    widths: tuple[str, ...] = _flag(
        (), "Tokens: a static width below --max_tokens at which a piece may be computed. Repeatable."
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


class Phase(NamedTuple):
    """A part of the run with its own algorithm, over the steps ``first`` (exclusive) to ``last`` of the shared count.

    ``numbers`` are what ``make_hyper`` gets; a program makes up to ``calls`` steps at once.
    """

    name: str
    algorithm: Algorithm
    config: TrainConfig
    numbers: dict[str, Any]
    first: int
    last: int
    calls: int


class Setup(NamedTuple):
    """What a run is made of; nothing is compiled yet. ``test`` plays the held-out tasks; ``notes`` are for the user."""

    settings: Settings
    env: Environment
    test: Environment
    codec: Codec
    model: TransformerConfig
    policy: Policy
    max_tokens: int
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Steps of all phases."""
        return self.phases[-1].last

    def hyper(self, phase: Phase) -> Hyper:
        """The traced numbers of a phase."""
        return train.make_hyper(phase.algorithm, self.env, **phase.numbers)

    def init(self, phase: Phase) -> Callable[..., train.TrainState]:
        """``(key, hyper, params=None) -> TrainState``."""
        return train.make_init(self.policy, self.codec, self.env, phase.algorithm, phase.config)

    def abstract(self, phase: Phase) -> train.TrainState:
        """Shapes and dtypes of the phase's state."""
        return jax.eval_shape(self.init(phase), jax.eval_shape(lambda: jax.random.key(0)), self.hyper(phase))


def build(settings: Settings) -> Setup:
    """Environment, model and phases; every impossible combination is refused here.

    Raises:
      ValueError: one line that names the value and what is allowed.
    """
    check_ranges(settings)
    if settings.supervised_steps + settings.steps < 1:
        raise ValueError("supervised_steps and steps are both 0: there is nothing to train")
    if settings.temperature == 0:
        raise ValueError("temperature must be above 0: greedy episodes of a group are all the same")
    whole, notes = make_environment(settings)
    env, test = split(whole, settings.held_out)
    codec, algorithm = codecs.byte(), make_algorithm(settings)
    model = make_model(settings, codec, algorithm)
    max_tokens, more = choose_max_tokens(settings, whole, codec)
    policy = transformer_policy(model)
    phases = tuple(_phases(settings, algorithm, max_tokens, env))
    for phase in phases:
        _check_phase(phase, policy, codec, env)
    return Setup(settings, env, test, codec, model, policy, max_tokens, phases, (*notes, *more))


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
    """``("a=1", "b=x")`` as ``{"a": 1, "b": "x"}``: Python literals, and strings where they are none.

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
            found[key] = text
    return found


def number(name: str, key: str, value: Any) -> Any:
    """``value``, when it is a finite number or a boolean.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return value
    raise ValueError(f"--{name}={key}={value}: {value!r} is not a finite number")


def make_environment(settings: Settings) -> tuple[Environment, tuple[str, ...]]:
    """The environment with its difficulty, not split yet, and what there is to report of a tasks file.

    Raises:
      ValueError: an unknown environment, option or parameter; a tasks file that cannot be used (its line is named).
    """
    options, notes = pairs("env_option", settings.env_option), ()
    name = env_name(settings)
    if name == "tasks":
        if not settings.tasks:
            raise ValueError("the environment 'tasks' needs --tasks=FILE.jsonl")
        options["path"] = settings.tasks
        notes = (f"{settings.tasks}: {load_tasks(settings.tasks).report}",)
    env = envs.make(name, **options)
    params = _env_params(env, ENV_PARAMS.get(name, {}) | pairs("env_params", settings.env_params))
    if params == env.params:
        return env, notes
    if "params" in inspect.signature(registry.factory(name)).parameters:  # The factory checks them.
        return envs.make(name, **options, params=params), notes
    return env._replace(params=params), notes


def env_name(settings: Settings) -> str:
    """The environment's name: ``tasks`` when there is a tasks file.

    Raises:
      ValueError: both a tasks file and another environment were asked for.
    """
    if not settings.tasks:
        return settings.env
    if settings.env not in ("calculator", "tasks"):
        raise ValueError(f"--tasks plays the environment 'tasks', but --env={settings.env} was given")
    return "tasks"


def _env_params(env: Environment, values: Mapping[str, Any]) -> Any:
    known = getattr(env.params, "_fields", ())
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{env.name} has no parameter {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
    for key, value in values.items():
        number("env_params", key, value)
        whole = isinstance(getattr(env.params, key), int | np.integer)
        if whole and not isinstance(value, int):
            raise ValueError(f"--env_params={key}={value}: {key} of {env.name} must be a whole number")
    return env.params._replace(**values) if values else env.params


def split(env: Environment, held_out: float) -> tuple[Environment, Environment]:
    """``(training side, held-out side)``; twice the same environment where nothing is held out.

    Raises:
      ValueError: there are too few tasks for two sides.
    """
    if held_out == 0:
        return env, env
    if env.name not in PLENTY:
        try:
            check_split(env, held_out, draws=1024)
        except ValueError as error:
            raise ValueError(f"{error}; --held_out=0 evaluates on training tasks") from error
    return envs.held_out(env, "train", held_out), envs.held_out(env, "test", held_out)


def make_algorithm(settings: Settings) -> Algorithm:
    """The preset of the RL phase with its options and its own numbers.

    Raises:
      ValueError: an unknown preset, option or number, listing what there is.
    """
    options, own = pairs("option", settings.option), _own_numbers(settings.algorithm)
    wrong = sorted(own & set(options))
    if wrong:
        raise ValueError(f"{wrong[0]} is a number: give it with --hyper={wrong[0]}=...")
    numbers = {k: v for k, v in _numbers(settings).items() if k in own}
    try:
        algorithm = algorithms.make(settings.algorithm, **options, **numbers)
    except TypeError as error:
        raise ValueError(f"--option of {settings.algorithm}: {error}") from error
    unused = [k for k, v in numbers.items() if k not in algorithm.hyper and v < 0]
    if unused:
        raise ValueError(f"{unused[0]} must not be negative, got {numbers[unused[0]]}")
    return algorithm


def _own_numbers(name: str) -> set[str]:
    """Keywords of a preset that are numbers: some of them, as a coefficient that is 0, leave no trace in ``hyper``."""
    algorithms.make(name)  # An unknown name is refused there.
    keywords = inspect.signature(algorithms.PRESETS[name]).parameters.values()
    return {keyword.name for keyword in keywords if isinstance(keyword.default, float)}


def _numbers(settings: Settings) -> dict[str, float]:
    """The numbers of ``--hyper`` and of the flags that stand for one."""
    given = {k: number("hyper", k, v) for k, v in pairs("hyper", settings.hyper).items()}
    flags = {k: getattr(settings, k) for k in NUMBERS if getattr(settings, k) is not None}
    reserved = {"decay", "env_params", "learning_rate", "warmup", "temperature", *flags}
    twice = sorted(set(given) & reserved)
    if twice:
        raise ValueError(f"--hyper={twice[0]}: it has a flag of its own, or follows from others")
    return given | flags


def make_model(settings: Settings, codec: Codec, algorithm: Algorithm) -> TransformerConfig:
    """Sizes of the policy.

    Raises:
      ValueError: sizes that do not fit together.
    """
    value_head = {"auto": "critic" in algorithm.needs, "yes": True, "no": False}[settings.value_head]
    return TransformerConfig(
        codec.vocab_size, layers=settings.layers, width=settings.width, heads=settings.heads,
        kv_heads=settings.kv_heads, mlp_width=settings.mlp_width, tied=settings.tied, value_head=value_head,
        dtype=settings.dtype,
    )  # fmt: skip


def choose_max_tokens(settings: Settings, env: Environment, codec: Codec) -> tuple[int, tuple[str, ...]]:
    """Tokens of a row, and a note on rows of a tasks file that need more."""
    name = env_name(settings)
    needed = _task_tokens(settings.tasks, codec) if name == "tasks" else {}
    if settings.max_tokens:
        size = settings.max_tokens
    elif name == "tasks":
        # Room for one more short call beside the teacher's conversation.
        size = _round_up(max(needed.values()) + 24)
    else:
        size = MAX_TOKENS.get(name) or _round_up(min(256, _worst_case(env, codec)))
    over = [line for line, tokens in needed.items() if tokens > size]
    if not over:
        return size, ()
    shown = ", ".join(map(str, over[:10])) + (", ..." if len(over) > 10 else "")
    return size, (f"{settings.tasks}: {len(over)} rows need more than max_tokens={size}: cut (line {shown})",)


def _task_tokens(path: str, codec: Codec) -> dict[int, int]:
    """Tokens of the teacher's conversation by line: prompt, call, result, answer, and their control ids."""
    sizes = {}
    for row in load_tasks(path).rows:
        call = len("calc ") + len(row.expression) + len(row.answer) + 3 if row.expression else 0
        sizes[row.line] = codec.max_tokens(len(row.prompt) + call + len("answer ") + len(row.answer)) + 5
    return sizes


def _worst_case(env: Environment, codec: Codec) -> int:
    turn = codec.max_tokens(env.spec.max_observation) + codec.max_tokens(env.spec.max_action) + 3
    return 1 + env.spec.max_turns * turn


def _round_up(tokens: int) -> int:
    return -(-tokens // 16) * 16


def _phases(settings: Settings, algorithm: Algorithm, max_tokens: int, env: Environment):
    widths = tuple(_whole("widths", text) for text in settings.widths)
    sizes = {"max_tokens": max_tokens, "segments": settings.segments}
    slots = settings.slots or None
    if settings.supervised_steps:
        episodes, steps = settings.supervised_episodes, settings.supervised_steps
        structure = UpdateConfig(
            microbatches=settings.supervised_microbatches, widths=widths, schedule=settings.supervised_schedule,
            optimizer=settings.optimizer,
        )  # fmt: skip
        config = TrainConfig(episodes, 1, slots and min(slots, episodes), update=structure, **sizes)
        numbers = {
            "learning_rate": settings.supervised_learning_rate, "warmup": settings.supervised_warmup, "decay": steps,
            "env_params": env.params,
        }  # fmt: skip
        yield Phase(
            SUPERVISED, algorithms.make("behavior_cloning"), config, numbers, 0, steps, min(CALLS[SUPERVISED], steps)
        )
    if settings.steps:
        structure = UpdateConfig(
            settings.epochs, settings.minibatches, settings.microbatches, widths, settings.schedule, settings.optimizer
        )
        config = TrainConfig(settings.episodes, settings.group_size, slots, update=structure, **sizes)
        left_out = _own_numbers(settings.algorithm) - set(algorithm.hyper)
        numbers = {k: v for k, v in _numbers(settings).items() if k not in left_out} | {
            "learning_rate": settings.learning_rate, "warmup": settings.warmup, "temperature": settings.temperature,
            "decay": settings.steps * settings.epochs * settings.minibatches, "env_params": env.params,
        }  # fmt: skip
        first = settings.supervised_steps
        yield Phase(RL, algorithm, config, numbers, first, first + settings.steps, CALLS[RL])


def _check_phase(phase: Phase, policy: Policy, codec: Codec, env: Environment) -> None:
    if phase.name == SUPERVISED and env.expert is None:
        raise ValueError(f"{env.name} has no scripted teacher: use --supervised_steps=0")
    if env.spec.roles != 1:
        raise ValueError(f"{env.name} has {env.spec.roles} seats; this program plays environments with one")
    train.check(policy, codec, env, phase.algorithm, phase.config)
    train.make_hyper(phase.algorithm, env, **phase.numbers)


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--{name}={text}: expected a whole number of at least 1")
    return int(text)


def describe(setup: Setup) -> dict[str, Any]:
    """The full configuration as plain values: settings, and everything that followed from them."""
    settings, phases = setup.settings, {}
    for phase in setup.phases:
        numbers = plain(setup.hyper(phase)._asdict())
        phases[phase.name] = {
            "algorithm": phase.algorithm.name, "needs": sorted(phase.algorithm.needs), "structure": plain(phase.config),
            "numbers": numbers, "first": phase.first, "last": phase.last,
        }  # fmt: skip
    env = {"name": setup.env.name, "version": setup.env.version, "spec": setup.env.spec, "params": setup.env.params}
    derived = {
        "env": plain(env), "codec": setup.codec.name, "model": plain(setup.model), "max_tokens": setup.max_tokens,
        "phases": phases,
    }  # fmt: skip
    if settings.tasks:
        derived["tasks_sha256"] = hashlib.sha256(Path(settings.tasks).read_bytes()).hexdigest()
    return {"settings": dataclasses.asdict(settings), "derived": derived}


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
