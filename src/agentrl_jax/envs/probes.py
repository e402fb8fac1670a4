"""Six probe environments, each with a known optimal value: what fails on one of them names the fault.

An action is read as a bit: the lowest bit of its first byte (so ``0`` is 0 and ``1`` is 1), and an empty action is
no bit. A policy that writes random bytes is therefore right half of the time, and learning needs no luck.

The value is the discounted sum over turns, ``sum_k discount**k * reward_k``, before the first action. All rewards are
proportional to the traced parameter ``reward``, called ``r`` below.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.envs.base import Environment, EnvSpec
from agentrl_jax.text import literal
from agentrl_jax.types import Array, Text, TimeStep

DELAY = 2
"""Turns between the choice of ``probe_delayed`` and its reward."""
LIMIT = 4
"""Turns after which ``probe_truncation`` is cut."""
CONTEXTS = 3
"""Contexts of an episode of ``probe_restart``."""

NAMES = (
    "probe_one_action",
    "probe_observation",
    "probe_delayed",
    "probe_transition",
    "probe_truncation",
    "probe_restart",
)
_OBSERVATION = 8
_ACTION = 2


class Params(NamedTuple):
    """``reward``: what the right behaviour earns."""

    reward: float = 1.0


class State(NamedTuple):
    """``turn``: actions so far, ``int32[]``. ``bit``: what was shown, chosen or reached, ``int32[]``."""

    turn: Array
    bit: Array


def optimal_value(name: str, discount: float, reward: float = 1.0) -> float:
    """Value of the first observation under the best policy, discounted by turn; formulas in each environment's text.

    Raises:
      ValueError: no such probe; ``discount`` outside ``[0, 1]``, or 1 for ``probe_truncation``, which never ends.
    """
    if name not in NAMES:
        raise ValueError(f"unknown probe {name!r}; known: {', '.join(NAMES)}")
    if not 0.0 <= discount <= 1.0 or (name == "probe_truncation" and discount == 1.0):
        raise ValueError(f"discount of {name} must be in [0, 1] (below 1 for probe_truncation), got {discount}")
    if name == "probe_truncation":
        return reward / (1.0 - discount)
    turns = {"probe_delayed": DELAY, "probe_transition": 1, "probe_restart": CONTEXTS - 1}
    return reward * discount ** turns.get(name, 0)


def _spec(turns: int) -> EnvSpec:
    return EnvSpec(max_observation=_OBSERVATION, max_action=_ACTION, max_turns=turns)


def _bit(action: Text) -> Array:
    return jnp.where(action.length > 0, action.data[0].astype(jnp.int32) & 1, -1)


def _digit(bit: Array, capacity: int) -> Text:
    data = jnp.zeros(capacity, jnp.uint8).at[0].set((48 + bit).astype(jnp.uint8))
    return Text(data, jnp.int32(1))


def _show(text: str) -> Text:
    return literal(text, _OBSERVATION)


def _state(turn: int, bit: Array | int) -> State:
    return State(jnp.int32(turn), jnp.asarray(bit, jnp.int32))


def _write(bit: int) -> Text:
    return literal(str(bit), _ACTION)


def _step(observation: Text, reward: Array, *, success: Array, **flags: Array | bool) -> TimeStep:
    return TimeStep(
        observation=observation, reward=reward, info={"success": jnp.asarray(success, jnp.float32)}, **flags
    )


def probe_one_action() -> Environment:
    """One action, constant reward: value ``r``. A learner that fails here cannot fit a constant."""

    def reset(key, params):
        return _state(0, 0), TimeStep(observation=_show("go"))

    def step(key, state, action, params):
        ts = _step(_show(""), params.reward, success=jnp.bool_(True), terminated=True)
        return state._replace(turn=state.turn + 1), ts

    return Environment("probe_one_action", "1", _spec(1), Params(), reset, step, lambda key, state, params: _write(0))


def probe_observation() -> Environment:
    """A digit, 0 or 1, is shown and must be echoed: value ``r``. A policy blind to its observation earns ``r / 2``."""

    def reset(key, params):
        bit = jax.random.bernoulli(key).astype(jnp.int32)
        return _state(0, bit), TimeStep(observation=_digit(bit, _OBSERVATION))

    def step(key, state, action, params):
        right = _bit(action) == state.bit
        ts = _step(_show(""), right * params.reward, success=right, terminated=True)
        return state._replace(turn=state.turn + 1), ts

    def expert(key, state, params):
        return _digit(state.bit, _ACTION)

    return Environment("probe_observation", "1", _spec(1), Params(), reset, step, expert)


def probe_delayed() -> Environment:
    """The first action must be 1 and is paid ``DELAY`` turns later: value ``r * discount**DELAY``."""

    def reset(key, params):
        return _state(0, 0), TimeStep(observation=_show("pick"))

    def step(key, state, action, params):
        chosen = jnp.where(state.turn == 0, _bit(action) == 1, state.bit == 1)
        over = state.turn >= DELAY
        ts = _step(_show("wait"), chosen * over * params.reward, success=chosen & over, terminated=over)
        return State(state.turn + 1, chosen.astype(jnp.int32)), ts

    return Environment(
        "probe_delayed", "1", _spec(DELAY + 1), Params(), reset, step, lambda key, state, params: _write(1)
    )


def probe_transition() -> Environment:
    """At the door 1 leads to gold, all else to coal; the second action is paid for gold: value ``r * discount``.

    The second observation is worth ``r`` (gold) or 0 (coal): only the state reached tells.
    """

    def reset(key, params):
        return _state(0, 0), TimeStep(observation=_show("door"))

    def step(key, state, action, params):
        over = state.turn >= 1
        gold = jnp.where(over, state.bit == 1, _bit(action) == 1)
        seen = _show("gold"), _show("coal")
        observation = jax.tree.map(lambda a, b: jnp.where(gold, a, b), *seen)
        ts = _step(observation, gold * over * params.reward, success=gold & over, terminated=over)
        return State(state.turn + 1, gold.astype(jnp.int32)), ts

    return Environment("probe_transition", "1", _spec(2), Params(), reset, step, lambda key, state, params: _write(1))


def probe_truncation() -> Environment:
    """Every turn pays ``r`` and the episode is cut after ``LIMIT`` turns, never over: value ``r / (1 - discount)``.

    All observations are equal, so only the bootstrap after the cut gives a consistent value; treating the cut as
    the end gives ``r * (1 - discount**k) / (1 - discount)`` with ``k`` turns left.
    """

    def reset(key, params):
        return _state(0, 0), TimeStep(observation=_show("tick"))

    def step(key, state, action, params):
        cut = state.turn + 1 >= LIMIT
        ts = _step(_show("tick"), params.reward, success=cut, truncated=cut)
        return state._replace(turn=state.turn + 1), ts

    return Environment(
        "probe_truncation", "1", _spec(LIMIT), Params(), reset, step, lambda key, state, params: _write(0)
    )


def probe_restart() -> Environment:
    """A digit is shown once; the context restarts after every action, and each new one shows only what was written.

    The last of ``CONTEXTS`` actions is paid when it is the digit: value ``r * discount**(CONTEXTS - 1)``. A learner
    that takes rows for episodes pays only the last row, and notes are never learned (``r / 2`` at best).
    """

    def reset(key, params):
        bit = jax.random.bernoulli(key).astype(jnp.int32)
        return _state(0, bit), TimeStep(observation=_digit(bit, _OBSERVATION))

    def step(key, state, action, params):
        over = state.turn >= CONTEXTS - 1
        right = (_bit(action) == state.bit) & over
        note = Text(jnp.zeros(_OBSERVATION, jnp.uint8).at[0].set(action.data[0]), jnp.minimum(action.length, 1))
        ts = _step(note, right * params.reward, success=right, terminated=over, restart=~over)
        return state._replace(turn=state.turn + 1), ts

    return Environment(
        "probe_restart",
        "1",
        _spec(CONTEXTS),
        Params(),
        reset,
        step,
        expert=lambda key, state, params: _digit(state.bit, _ACTION),
        privileged=lambda state: _digit(state.bit, _OBSERVATION),
    )
