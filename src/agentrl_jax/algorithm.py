"""An algorithm is a NamedTuple of pure functions, as an optimiser is in optax; a preset is a few lines of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from agentrl_jax.codecs.base import Codec
from agentrl_jax.scoring import View
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Score, Start, Trajectory

POLICY_VIEW: dict[str, View] = {"policy": View()}


class Hyper(NamedTuple):
    """Every number of a training run: traced, so a sweep is a ``vmap`` and a new value compiles nothing.

    Attributes:
      learning_rate: peak step size.
      weight_decay: decoupled, on matrices alone.
      max_grad_norm: global-norm clip of the whole minibatch's gradient.
      warmup: optimiser updates of linear warm-up.
      decay: optimiser updates after which the schedule of ``UpdateConfig.schedule`` has run out; 0: not said, which
        ``make_train`` alone can make up for.
      temperature: of sampling, and therefore of scoring.
      env_params: difficulty.
      algorithm: ``Algorithm.hyper``.
    """

    learning_rate: Array | float = 1e-3
    weight_decay: Array | float = 0.0
    max_grad_norm: Array | float = 1.0
    warmup: Array | float = 0.0
    decay: Array | float = 0.0
    temperature: Array | float = 1.0
    env_params: PyTree = None
    algorithm: dict[str, Any] = {}  # noqa: RUF012 - never mutated: a NamedTuple default


class TrainState(NamedTuple):
    """All that a run needs to go on: it is what a checkpoint holds.

    Attributes:
      step: ``int32[]``, steps of rollout and update done.
      params: parameters by model name: ``policy``, and ``reference`` where the algorithm needs it.
      opt_state: of the trained models.
      updates, skipped: ``int32[]``, optimiser updates made, and refused because a gradient was not finite.
      memory: the algorithm's.
      hyper: the numbers of the run.
      key: root key; step ``s`` uses ``fold_in(key, s)``.
    """

    step: Array
    params: dict[str, PyTree]
    opt_state: PyTree
    updates: Array
    skipped: Array
    memory: PyTree
    hyper: Hyper
    key: Array


class Tools(NamedTuple):
    """What a step lends to an algorithm; every function uses the parameters at the start of the step.

    Attributes:
      roll: ``(key, call=0, start=None, expert=False, episodes=None, group_size=None, record=False) -> Trajectory``;
        calls with another number are independent. With ``expert`` the scripted teacher writes every turn and the model
        is not run; ``episodes`` and ``group_size`` are static and the step's by default; with ``record`` the
        trajectory keeps the environment's state before every action (``branching.branch``).
      score: ``(View, Batch) -> Score``, without gradient.
      episodes, group_size, groups, segments: static sizes of a rollout.
      single: the step makes one update, from the parameters that sampled: ``logp_old`` then is the policy's own
        log-probability under stop-gradient, and needs no scoring of its own.
      max_tokens, max_turns: static sizes of an episode.
      codec: what tokens are.
    """

    roll: Callable[..., Trajectory]
    score: Callable[[View, Batch], Score]
    episodes: int
    group_size: int
    groups: int
    segments: int
    single: bool
    max_tokens: int
    max_turns: int
    codec: Codec


class Shape(NamedTuple):
    """Static sizes of a step that memory may depend on."""

    episodes: int
    group_size: int
    max_tokens: int
    max_turns: int


def no_memory(key: Array, shape: Shape) -> PyTree:
    """No state between steps."""
    del key, shape
    return ()


def roll_once(memory: PyTree, tools: Tools, hyper: dict[str, Array], key: Array) -> tuple[PyTree, Trajectory]:
    """The default of ``Algorithm.collect``: one rollout of fresh tasks in equal groups."""
    del hyper
    return memory, tools.roll(key)


def keep_state(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
    """The default of ``Algorithm.finish``: nothing more to do."""
    del metrics, hyper
    return state


class Algorithm(NamedTuple):
    """Pure functions that say where experience comes from, what it is worth, and what is minimised.

    Attributes:
      name: what results are filed under.
      prepare: ``(memory, Trajectory, Tools, hyper, key) -> (memory, Batch, Metrics)``, a chain of stages.
      weigh: ``(Batch, hyper, segments) -> Batch``, per minibatch, before micro-batches: all denominators, all
        couplings between units.
      loss: ``(dict[str, Score], Batch, hyper) -> (float32[], Metrics)``, additive over units.
      hyper: every number read by these functions: traced.
      needs: what must be there, refused before compile when it is not: ``critic``, ``reference``, ``expert``, ``pairs``
        (groups of two or more), ``group`` (likewise, for statistics), ``single`` (one update a step: the loss does not
        correct for a policy that has moved on), ``logp_old`` (a stage sets ``Batch.logp_old``, and it stays),
        ``one_segment`` (contexts do not restart), ``parts:NAME`` (the environment reports ``NAME`` in its
        info), ``group>=NUMBER`` (groups of so many at least).
      init: ``(key, Shape) -> memory``: moving averages, histories, ring buffers.
      collect: ``(memory, Tools, hyper, key) -> (memory, Trajectory)``.
      views: what is scored under gradient, by name. When a step makes a single update ``Batch.logp_old`` is taken from
        the view called ``policy``; where there is none, ``prepare`` must score it (``score_policy(always=True)``).
      finish: ``(TrainState, Metrics, hyper) -> TrainState``.
    """

    name: str
    prepare: Callable[..., tuple[PyTree, Batch, Metrics]]
    weigh: Callable[[Batch, dict[str, Array], int], Batch]
    loss: Callable[[dict[str, Score], Batch, dict[str, Array]], tuple[Array, Metrics]]
    hyper: dict[str, float]
    needs: frozenset[str] = frozenset()
    init: Callable[[Array, Shape], PyTree] = no_memory
    collect: Callable[..., tuple[PyTree, Trajectory]] = roll_once
    views: dict[str, View] = POLICY_VIEW
    finish: Callable[[TrainState, Metrics, dict[str, Array]], TrainState] = keep_state


def start_for_expert(episodes: int, turns: int) -> Start:
    """A start in which the expert writes every turn: supervised data through the same stream."""
    return Start(teacher_turns=jnp.full(episodes, turns, jnp.int32))
