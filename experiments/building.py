"""What is built from the settings of a run: environment, model and phases, checked before any compile."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from settings import NUMBERS, Settings, check_ranges, number, pairs, plain

from agentrl_jax import algorithms, codecs, envs, train
from agentrl_jax.algorithm import Algorithm, Hyper
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs import registry
from agentrl_jax.envs.base import Environment
from agentrl_jax.envs.splits import check_split
from agentrl_jax.envs.tasks_file import load_tasks
from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.policy import Policy
from agentrl_jax.train import TrainConfig
from agentrl_jax.update import UpdateConfig

SUPERVISED, RL = "supervised", "rl"
# Where an environment is better served by something else than the general rule.
MAX_TOKENS = {"calculator": 80}
ENV_PARAMS = {"calculator": {"teacher_wrong": 0.4, "teacher_guess": 0.3}}
# So many distinct tasks at any difficulty that counting them would only cost time.
PLENTY = ("calculator",)
CALLS = {SUPERVISED: 10, RL: 1}


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
    options, own = pairs("option", settings.option), algorithms.numbers(settings.algorithm)
    wrong = sorted(own & set(options))
    if wrong:
        raise ValueError(f"{wrong[0]} is a number: give it with --hyper={wrong[0]}=...")
    numbers = {k: v for k, v in _numbers(settings).items() if k in own}
    return algorithms.make(settings.algorithm, **options, **numbers)


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
        kv_heads=settings.kv_heads, mlp_width=settings.mlp_width, rope_theta=settings.rope_theta, tied=settings.tied,
        value_head=value_head, dtype=settings.dtype,
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
    longest = codec.max_tokens(env.spec.max_observation) + 4
    if not needed and size < longest:
        return size, (
            f"max_tokens={size}: an observation of {env.name} may take {longest - 1} and leave no room to act",
        )
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


def _phases(settings: Settings, algorithm: Algorithm, max_tokens: int, env: Environment) -> Iterator[Phase]:
    widths = tuple(_whole("widths", text) for text in settings.widths) or _widths(max_tokens)
    sizes = {"max_tokens": max_tokens, "segments": settings.segments}
    slots = settings.slots or None
    if settings.supervised_steps:
        episodes, steps = settings.supervised_episodes, settings.supervised_steps
        structure = UpdateConfig(
            microbatches=settings.supervised_microbatches or _pieces(episodes), widths=widths,
            schedule=settings.supervised_schedule, optimizer=settings.optimizer,
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
        units = settings.episodes // settings.group_size if "pairs" in algorithm.needs else settings.episodes
        structure = UpdateConfig(
            settings.epochs, settings.minibatches, settings.microbatches or _pieces(units // settings.minibatches),
            widths, settings.schedule, settings.optimizer,
        )  # fmt: skip
        config = TrainConfig(settings.episodes, settings.group_size, slots, update=structure, **sizes)
        left_out = algorithms.numbers(settings.algorithm) - set(algorithm.hyper)
        numbers = {k: v for k, v in _numbers(settings).items() if k not in left_out} | {
            "learning_rate": settings.learning_rate, "warmup": settings.warmup, "temperature": settings.temperature,
            "decay": settings.steps * settings.epochs * settings.minibatches, "env_params": env.params,
        }  # fmt: skip
        first = settings.supervised_steps
        yield Phase(RL, algorithm, config, numbers, first, first + settings.steps, CALLS[RL])


def _widths(max_tokens: int) -> tuple[int, ...]:
    """Half and about three quarters of a row: most episodes are shorter than the longest."""
    return max_tokens // 16 * 8, max_tokens * 3 // 32 * 8


def _pieces(units: int) -> int:
    return 2 if units > 0 and units % 2 == 0 else 1


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
