"""The survey's algorithms as data: what is composed, where it is from, and where this deviates from the paper.

A preset is a few keywords of ``compose``, ``prefer`` or ``unpaired``; what it does not say is their default. Where the
survey's one-line gloss contradicts the paper, the paper is followed.
"""

from __future__ import annotations

import inspect
from typing import Any

from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.card import Preset
from agentrl_jax.algorithms.compared import COMPARED
from agentrl_jax.algorithms.compose import compose
from agentrl_jax.algorithms.grouped import GROUPED
from agentrl_jax.algorithms.single import SINGLE
from agentrl_jax.algorithms.supervised import behavior_cloning

_SUPERVISED = {
    "behavior_cloning": Preset(
        "ALVINN",
        "Pomerleau, 1988",
        {},
        build=behavior_cloning,
        about="The cold start: the expert's tokens, by likelihood.",
    ),
}

PRESETS: dict[str, Preset] = {**SINGLE, **GROUPED, **COMPARED, **_SUPERVISED}
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
