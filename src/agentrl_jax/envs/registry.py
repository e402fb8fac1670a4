"""Environments by name: ``make``, ``names``, ``register``; equal calls return the identical object."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from agentrl_jax.envs.base import Environment

P = ParamSpec("P")
R = TypeVar("R")

_BUILTIN = {
    "calculator": "agentrl_jax.envs.calculator:calculator",
    "guess": "agentrl_jax.envs.guess:guess",
    "probe_delayed": "agentrl_jax.envs.probes:probe_delayed",
    "probe_observation": "agentrl_jax.envs.probes:probe_observation",
    "probe_one_action": "agentrl_jax.envs.probes:probe_one_action",
    "probe_restart": "agentrl_jax.envs.probes:probe_restart",
    "probe_transition": "agentrl_jax.envs.probes:probe_transition",
    "probe_truncation": "agentrl_jax.envs.probes:probe_truncation",
    "tasks": "agentrl_jax.envs.tasks:tasks",
}
_registered: dict[str, Callable[..., Environment]] = {}


def _frozen(value: Any, where: str) -> Any:
    """``value`` as a key in which ``1``, ``1.0`` and ``True`` differ, as do their tuples."""
    if isinstance(value, tuple):
        return type(value), tuple(_frozen(item, where) for item in value)
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(f"{where} must be hashable (a number, string, tuple or function), got {value!r}") from error
    return type(value), value


def memoised(build: Callable[P, R]) -> Callable[P, R]:
    """Makes equal calls return the identical object, however the arguments are spelled, so nothing is retraced.

    Raises (in a call):
      ValueError: an argument is not hashable.
    """
    signature = inspect.signature(build)
    made: dict[Any, R] = {}

    @functools.wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = tuple((name, _frozen(value, f"{build.__name__}: {name}")) for name, value in bound.arguments.items())
        if key not in made:
            made[key] = build(*bound.args, **bound.kwargs)
        return made[key]

    return call


def names() -> tuple[str, ...]:
    """The names that ``make`` knows, sorted."""
    return tuple(sorted({*_BUILTIN, *_registered}))


def register(name: str, factory: Callable[..., Environment]) -> None:
    """Adds ``factory(**static) -> Environment`` to the registry.

    Raises:
      ValueError: the name is taken, or not a non-empty string without spaces; the factory is not callable.
    """
    if not isinstance(name, str) or not name or name != "".join(name.split()):
        raise ValueError(f"an environment's name is a non-empty string without spaces, got {name!r}")
    if name in names():
        raise ValueError(f"environment {name!r} is already registered; names() lists what is taken")
    if not callable(factory):
        raise ValueError(f"environment {name!r}: the factory must be callable, got {factory!r}")
    _registered[name] = factory


def factory(name: str) -> Callable[..., Environment]:
    """The function that builds ``name``; its signature lists the static arguments.

    Raises:
      ValueError: no such name.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILTIN:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(names())}")
    module, function = _BUILTIN[name].split(":")
    return getattr(importlib.import_module(module), function)


def make(name: str, **static: Any) -> Environment:
    """Builds an environment; the same call returns the identical object, so a second one never retraces.

    A file that a factory reads is therefore read once a process.

    Raises:
      ValueError: unknown name, unknown, missing or unhashable argument; the message lists what is allowed.
      TypeError: the factory returned something else than an ``Environment``.
    """
    build = factory(name)
    signature = inspect.signature(build)
    try:
        bound = signature.bind(**static)
    except TypeError as error:
        raise ValueError(f"environment {name!r} takes {name}{signature}: {error}") from error
    bound.apply_defaults()
    arguments = []
    for parameter, value in bound.arguments.items():
        free = signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD
        arguments.append((parameter, tuple(sorted(value.items())) if free else value))
    key = tuple((p, _frozen(value, f"environment {name!r}: {p}")) for p, value in arguments)
    if (build, key) not in _made:
        _made[build, key] = _checked(name, build(*bound.args, **bound.kwargs))
    return _made[build, key]


_made: dict[Any, Environment] = {}


def _checked(name: str, env: Environment) -> Environment:
    if not isinstance(env, Environment):
        raise TypeError(f"the factory of environment {name!r} returned {type(env).__name__}, not an Environment")
    return env
