"""What a preset says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from agentrl_jax.algorithms.compose import compose


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
