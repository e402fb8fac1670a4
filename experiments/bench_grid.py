"""What a benchmark is made of: methods, environments and the grid of their pairs, checked before anything is compiled.

A token of a list is a name with options behind colons, ``grpo:eps_high=0.28:aggregation=token-mean:label=clip-higher``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import building
from settings import Settings, number, pairs, plain

import agentrl_jax
from agentrl_jax import algorithms, codecs, train
from agentrl_jax.algorithm import Algorithm, Hyper
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs import registry, transforms
from agentrl_jax.envs.base import Environment
from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.policy import Policy
from agentrl_jax.train import TrainConfig
from agentrl_jax.update import UpdateConfig


def _flag(default: Any, help_: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_, **limits})


@dataclasses.dataclass(frozen=True)
class Options:
    """Every flag of ``benchmark.py``: ``low``, ``high`` and ``choices`` are what is allowed."""

    algos: str = _flag(
        "grpo,rloo,ppo",
        "Algorithms, separated by commas, each with its options: grpo:eps_high=0.28:group_size=4:label=NAME.",
    )
    envs: str = _flag(
        "guess,calculator",
        "Environments, each with its options: guess:high=50:max_turns=8:max_tokens=128:label=NAME. series=N: N tasks "
        "an episode (paid_at_end=True: at its end); thoughts=N: a teacher that begins with a line of up to N dots.",
    )
    seeds: int = _flag(4, "Runs of every pair.", low=1)
    sweep: str = _flag(
        "", "name=value,value;name=value,value: a grid of traced numbers in one program, for a single algorithm."
    )
    baseline: str = _flag("grpo", "Label of the method that the others are compared with.")
    bar: float = _flag(0.9, "Held-out success whose cost in tokens is reported.", low=0.0, high=1.0)

    name: str = _flag("benchmark", "Name of the benchmark, its folder under --root. Finished pairs in it are kept.")
    root: str = _flag("runs", "Folder that holds the runs.")
    seed: int = _flag(0, "Root of all randomness.", low=0, high=2**32 - 1)
    how: str = _flag(
        "pmap",
        "Seeds spread over devices (on a single one: one after the other), one after the other, or at once.",
        choices=("pmap", "map", "vmap"),
    )
    cpu_devices: int = _flag(0, "Devices into which JAX divides the CPU; 0: one a core, up to --seeds.", low=0)
    compile_cache: str = _flag("", "Folder that keeps compiled programs for the next time; empty: none.")

    budget: int = _flag(60_000, "Tokens of a run: read, written, and thrown away.", low=1, high=2 * 10**9)
    max_steps: int = _flag(5000, "Steps after which a run ends even below its budget.", low=1)
    episodes: int = _flag(64, "Episodes of a step, a multiple of --group_size.", low=1)
    group_size: int = _flag(8, "Episodes that try the same task, unless an algorithm says otherwise.", low=1)
    slots: int = _flag(0, "Episodes in play at once; 0: all of them.", low=0)
    epochs: int = _flag(1, "Passes over a step's episodes, of algorithms that correct for a moved policy.", low=1)
    minibatches: int = _flag(1, "Optimiser updates a pass, of the same algorithms.", low=1)
    microbatches: int = _flag(1, "Pieces in which a gradient is computed, rows sorted by length; exact.", low=1)
    widths: tuple[str, ...] = _flag(
        (), "Tokens: a static width below a row's at which a piece may be computed. Repeatable."
    )
    learning_rate: float = _flag(3e-4, "Step size.", low=0.0)
    warmup: int = _flag(3, "Updates of its linear warm-up; constant after it.", low=0)
    temperature: float = _flag(1.0, "Of sampling, in training and evaluation.", low=0.01)

    layers: int = _flag(2, "Blocks of the transformer.", low=1)
    width: int = _flag(64, "Width of its residual stream.", low=1)
    heads: int = _flag(4, "Query heads.", low=1)
    mlp_width: int = _flag(0, "Inner width of its feed-forward; 0: four times --width.", low=0)
    rope_theta: float = _flag(100.0, "Base of its rotary frequencies.", low=1.0)

    supervised_steps: int = _flag(200, "Steps of the cold start that all methods begin from; 0: random weights.", low=0)
    supervised_episodes: int = _flag(64, "Episodes of a supervised step.", low=1)
    supervised_learning_rate: float = _flag(4e-3, "Peak step size of the cold start, cosine schedule.", low=0.0)
    supervised_warmup: int = _flag(20, "Updates of its linear warm-up.", low=0)

    held_out: float = _flag(0.1, "Share of tasks kept for evaluation.", low=0.0, high=0.99)
    evals: int = _flag(4, "Evaluations of a run after the one at the start, evenly over its budget.", low=1)
    eval_problems: int = _flag(32, "Held-out tasks of an evaluation.", low=1)
    eval_samples: int = _flag(8, "Sampled tries of each task, beside the greedy one.", low=1)


# Where a benchmark is better served by another difficulty than the environment's own. All tasks of guess begin with the
# same observation, so none can be held out.
ENVIRONMENTS = {
    "guess": ("high=20", "max_turns=6", "max_tokens=96", "teacher_noise=0.4", "held_out=0"),
    "calculator": ("max_operators=1", "max_depth=0", "max_digits=2", "max_turns=2", "max_tokens=64"),
}
NUMBERS = tuple(name for name in Hyper._fields if name not in ("decay", "env_params", "algorithm"))
SIZES = ("episodes", "group_size", "slots", "epochs", "minibatches", "microbatches")
_ARENA = (
    "max_tokens", "segments", "held_out", "supervised_steps", "budget", "eval_problems", "label", "series",
    "paid_at_end", "thoughts",
)  # fmt: skip
_SHORT = {"lr": "learning_rate"}


class Method(NamedTuple):
    """An algorithm of the list: ``numbers`` are of the run, ``sizes`` of its steps."""

    label: str
    algorithm: Algorithm
    options: dict[str, Any]
    numbers: dict[str, float]
    sizes: dict[str, int]


class Arena(NamedTuple):
    """An environment of the list, not split yet, and what all its pairs share; ``source`` is a hash of a tasks file."""

    label: str
    env: Environment
    held_out: float
    max_tokens: int
    segments: int
    supervised_steps: int
    budget: int
    eval_problems: int
    policy: Policy
    codec: Codec
    model: TransformerConfig
    source: str


class Point(NamedTuple):
    """One setting of the swept numbers; without a sweep the only one, under the method's label."""

    label: str
    numbers: dict[str, float]


class Pair(NamedTuple):
    """A method in an environment; ``reason`` says why it cannot be played there, ``key`` is a hash of ``settings``."""

    method: Method
    arena: Arena
    config: TrainConfig
    points: tuple[Point, ...]
    settings: dict[str, Any]
    key: str
    reason: str

    @property
    def label(self) -> str:
        """As it is printed."""
        return f"{self.method.label} on {self.arena.label}"

    @property
    def file(self) -> str:
        """Name of its result."""
        safe = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in f"{self.arena.label}--{self.method.label}")
        return f"{safe[:80]}-{self.key}.json"


def plan(options: Options) -> tuple[Pair, ...]:
    """The pairs of the grid, environment by environment.

    Raises:
      ValueError: one line that names the value and what is allowed.
    """
    if options.episodes % options.group_size:
        raise ValueError(f"episodes={options.episodes} must be a multiple of group_size={options.group_size}")
    for width in options.widths:
        _whole(f"--widths={width}", "a width", int(width) if width.isdecimal() else width)
    methods = [_method(token) for token in _tokens("algos", options.algos)]
    sweep = parse_sweep(options.sweep)
    if sweep and len(methods) != 1:
        raise ValueError(f"--sweep goes through the numbers of one algorithm, and --algos names {len(methods)}")
    arenas = [_arena(token, options) for token in _tokens("envs", options.envs)]
    for name, labels in (("algos", [m.label for m in methods]), ("envs", [a.label for a in arenas])):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"--{name}: {twice[0]!r} stands there twice: give one of them another label=NAME")
    found = tuple(_pair(method, arena, _points(method, sweep), options) for arena in arenas for method in methods)
    if all(pair.reason for pair in found):
        raise ValueError(f"nothing can be played: {found[0].label}: {found[0].reason}")
    return found


def _tokens(flag: str, text: str) -> list[tuple[str, tuple[str, ...], str]]:
    """``(name, options, token)`` of a comma-separated list."""
    found = []
    outside = re.compile(r",(?![^()]*\))")  # A value may be a tuple: filters=('varied',).
    for token in filter(None, (part.strip() for part in outside.split(text))):
        name, *items = (part.strip() for part in token.split(":"))
        found.append((name, tuple(items), token))
    if not found:
        raise ValueError(f"--{flag} is empty")
    return found


def _method(token: tuple[str, tuple[str, ...], str]) -> Method:
    name, items, text = token
    given = pairs("algos", items)
    label = str(given.pop("label", text))
    numbers = {key: float(number("algos", key, given.pop(key))) for key in NUMBERS if key in given}
    sizes = {key: _whole(f"--algos={text}", key, given.pop(key)) for key in SIZES if key in given}
    return Method(label, algorithms.make(name, **given), {"name": name, **given}, numbers, sizes)


def _arena(token: tuple[str, tuple[str, ...], str], options: Options) -> Arena:
    name, items, text = token
    structure = set(inspect.signature(registry.factory(name)).parameters) - {"params"}
    defaults = [item for item in ENVIRONMENTS.get(name, ()) if item.split("=")[0] not in pairs("envs", items)]
    given = pairs("envs", items)
    chosen = pairs("envs", (*defaults, *items))
    own = {key: chosen.pop(key) for key in _ARENA if key in chosen}
    settings = Settings(
        env=name, tasks=str(chosen.pop("path", "")) if name == "tasks" else "",
        env_option=tuple(f"{key}={value!r}" for key, value in chosen.items() if key in structure),
        env_params=tuple(f"{key}={value!r}" for key, value in chosen.items() if key not in structure),
        max_tokens=_whole(f"--envs={text}", "max_tokens", own.get("max_tokens", 0), 0),
    )  # fmt: skip
    env = _transformed(building.make_environment(settings)[0], own)
    if env.spec.roles != 1:
        raise ValueError(f"{env.name} has {env.spec.roles} seats; this program plays environments with one")
    codec = codecs.byte()
    model = _model(options, codec)
    whole = lambda key, default: _whole(f"--envs={text}", key, own.get(key, default), 0)  # noqa: E731
    held_out = float(number("envs", "held_out", own.get("held_out", options.held_out)))
    if not 0 <= held_out < 1:
        raise ValueError(f"--envs={text}: held_out must be in [0, 1), got {held_out}")
    return Arena(
        str(own.get("label", text if given else name)), env, held_out,
        building.choose_max_tokens(settings, env, codec)[0], max(1, whole("segments", 1)),
        whole("supervised_steps", options.supervised_steps) if env.expert is not None else 0,
        max(1, whole("budget", options.budget)), max(1, whole("eval_problems", options.eval_problems)),
        transformer_policy(model), codec, model,
        hashlib.sha256(Path(settings.tasks).read_bytes()).hexdigest() if settings.tasks else "",
    )  # fmt: skip


def _transformed(env: Environment, own: dict[str, Any]) -> Environment:
    if "series" in own:
        env = transforms.series(env, own["series"], paid_at_end=own.get("paid_at_end", False))
    elif "paid_at_end" in own:
        raise ValueError("--envs: paid_at_end belongs to series=N")
    return transforms.thinking(env, own["thoughts"]) if "thoughts" in own else env


def _model(options: Options, codec: Codec) -> TransformerConfig:
    """One model for all: a value head starts at 0 and only an algorithm with a critic trains it, so all begin alike."""
    return TransformerConfig(
        codec.vocab_size, layers=options.layers, width=options.width, heads=options.heads, mlp_width=options.mlp_width,
        rope_theta=options.rope_theta, value_head=True,
    )  # fmt: skip


def _whole(where: str, key: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{where}: {key} must be a whole number of at least {low}, got {value!r}")
    return value


def parse_sweep(text: str) -> dict[str, tuple[float, ...]]:
    """``"lr=1e-4,3e-4;eps_high=.2"`` as ``{"learning_rate": (1e-4, 3e-4), "eps_high": (.2,)}``.

    Raises:
      ValueError: no ``name=value``, a value that is no finite number or stands there twice, a name given twice.
    """
    found: dict[str, tuple[float, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, values = (part.strip() for part in item.partition("="))
        key = _SHORT.get(key, key)
        if not equals or not key or not values or key in found:
            raise ValueError(f"--sweep: expected name=value,value;name=..., every name once, got {item!r}")
        try:
            numbers = tuple(float(value) for value in values.split(","))
        except ValueError as error:
            raise ValueError(f"--sweep={item}: {error}") from error
        for value in numbers:
            number("sweep", key, value)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"--sweep={item}: a value stands there twice")
        found[key] = numbers
    return found


def _points(method: Method, sweep: dict[str, tuple[float, ...]]) -> tuple[Point, ...]:
    known = (*NUMBERS, *sorted(method.algorithm.hyper))
    for name in sweep:
        if name not in known:
            raise ValueError(
                f"--sweep: {method.algorithm.name} has no traced number {name!r}; it has: {', '.join(known)} "
                f"(a term that is off leaves no number: turn it on, {method.algorithm.name}:{name}=VALUE)"
            )
    if not sweep:
        return (Point(method.label, {}),)
    grid = itertools.product(*sweep.values())
    named = [dict(zip(sweep, values, strict=True)) for values in grid]
    return tuple(Point(" ".join(f"{k}={v:g}" for k, v in numbers.items()), numbers) for numbers in named)


def _pair(method: Method, arena: Arena, points: Sequence[Point], options: Options) -> Pair:
    config = _config(method, arena, options)
    for point in points:
        hyper(method, arena, point, options)
    settings = _settings(method, arena, config, points, options)
    key = digest(settings)
    try:
        train.check(arena.policy, arena.codec, arena.env, method.algorithm, config)
        reason = ""
    except ValueError as error:
        reason = str(error)
    return Pair(method, arena, config, tuple(points), settings, key, reason)


def _config(method: Method, arena: Arena, options: Options) -> TrainConfig:
    size = lambda name: method.sizes.get(name, getattr(options, name))  # noqa: E731
    # Asked for by name it is refused where it cannot be; a general wish does not reach those.
    several = (lambda name: method.sizes.get(name, 1)) if "single" in method.algorithm.needs else size
    structure = UpdateConfig(
        several("epochs"), several("minibatches"), size("microbatches"),
        tuple(width for width in map(int, options.widths) if width < arena.max_tokens),
    )  # fmt: skip
    slots = min(size("slots"), size("episodes")) or None
    return TrainConfig(size("episodes"), size("group_size"), slots, arena.max_tokens, arena.segments, structure)


def hyper(method: Method, arena: Arena, point: Point, options: Options) -> Hyper:
    """The traced numbers of a point.

    Raises:
      ValueError: a number out of range.
    """
    given = {name: getattr(options, name) for name in ("learning_rate", "warmup", "temperature")}
    numbers = given | method.numbers | point.numbers
    return train.make_hyper(method.algorithm, arena.env, **numbers)


def cold_start_settings(arena: Arena, options: Options) -> dict[str, Any]:
    """All that the weights depend on from which the methods begin."""
    env = {"name": arena.env.name, "version": arena.env.version, "spec": arena.env.spec, "params": arena.env.params}
    names = ("seed", "supervised_episodes", "supervised_learning_rate", "supervised_warmup", "slots")
    source = {"source": arena.source} if arena.source else {}
    return source | {
        "env": plain(env), "model": plain(arena.model), "held_out": arena.held_out, "max_tokens": arena.max_tokens,
        "segments": arena.segments, "supervised_steps": arena.supervised_steps, "version": agentrl_jax.__version__,
    } | {name: getattr(options, name) for name in names}  # fmt: skip


def _settings(
    method: Method, arena: Arena, config: TrainConfig, points: Sequence[Point], options: Options
) -> dict[str, Any]:
    """Everything that a pair's result depends on, as plain values."""
    names = ("seeds", "seed", "max_steps", "evals", "eval_samples", "temperature")
    algorithm = method.algorithm
    return {
        "cold_start": cold_start_settings(arena, options), "budget": arena.budget,
        "eval_problems": arena.eval_problems, "structure": plain(config),
        "algorithm": {**method.options, "needs": sorted(algorithm.needs), "hyper": plain(algorithm.hyper)},
        "points": [
            {"label": point.label, "numbers": plain(hyper(method, arena, point, options)._replace(env_params=None))}
            for point in points
        ],
    } | {name: getattr(options, name) for name in names}  # fmt: skip


def digest(settings: dict[str, Any]) -> str:
    """Twelve characters that stand for plain values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


@functools.cache
def split(arena: Arena) -> tuple[Environment, Environment, str]:
    """``(training side, held-out side, note)``: the same environment twice, where there are too few different tasks."""
    try:
        note = "" if arena.held_out else "No tasks are held out: evaluation draws from those of training."
        return *building.split(arena.env, arena.held_out), note
    except ValueError:
        return arena.env, arena.env, "Too few different tasks to hold some out: evaluation draws from all of them."
