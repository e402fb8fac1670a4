"""Number guessing with ``higher``/``lower`` feedback: many turns, no tool."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.envs.base import Environment, EnvSpec
from agentrl_jax.text import concat, format_int, hash_, last_line, literal, parse_int
from agentrl_jax.types import Array, PyTree, Text, TimeStep

_OBSERVATION = 32
_ACTION = 16
_BOUND = 10**9
_ERROR = "error: write one integer"


class Params(NamedTuple):
    """Range ``low..high`` of the number, ends included, within ``+-10**9``; share of the teacher's random guesses."""

    low: int = 1
    high: int = 100
    teacher_noise: float = 0.1


class State(NamedTuple):
    """``target``; ``low..high``, what the replies so far leave of its range; ``turn``, actions so far; ``int32[]``."""

    target: Array
    low: Array
    high: Array
    turn: Array


def _range(params: PyTree) -> tuple[Array, Array]:
    """The range inside its bounds, never empty."""
    low = jnp.clip(jnp.asarray(params.low, jnp.int32), -_BOUND, _BOUND)
    return low, jnp.clip(jnp.asarray(params.high, jnp.int32), low, _BOUND)


def _span(low: Array, high: Array, head: str) -> Text:
    return concat(head, format_int(low), "..", format_int(high), capacity=_OBSERVATION)[0]


def _reset(key: Array, params: PyTree) -> tuple[State, TimeStep]:
    low, high = _range(params)
    state = State(jax.random.randint(key, (), low, high + 1), low, high, jnp.int32(0))
    return state, TimeStep(observation=_span(low, high, "guess "))


def _reply(valid: Array, guess: Array, target: Array) -> Text:
    """``higher`` or ``lower``, where the number lies; nothing when it was found."""
    words = [literal(word, _OBSERVATION) for word in ("higher", "lower", "", _ERROR)]
    which = jnp.where(valid, jnp.where(guess < target, 0, jnp.where(guess > target, 1, 2)), 3)
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(w) for w in x])[which], *words)


def _step(key: Array, state: State, action: Text, params: PyTree, turns: int) -> tuple[State, TimeStep]:
    guess, valid = parse_int(last_line(action))
    found = valid & (guess == state.target)
    # One beyond the bounds is as good as any number there, and cannot wrap below.
    near = jnp.clip(guess, -_BOUND - 1, _BOUND + 1)
    low = jnp.where(valid & (guess < state.target), jnp.maximum(state.low, near + 1), state.low)
    high = jnp.where(valid & (guess > state.target), jnp.minimum(state.high, near - 1), state.high)
    turn = state.turn + 1
    ts = TimeStep(
        observation=_reply(valid, guess, state.target),
        reward=found,
        terminated=found,
        truncated=~found & (turn >= turns),
        info={"success": found, "malformed": ~valid},
    )
    return State(state.target, low, high, turn), ts


def _expert(key: Array, state: State, params: PyTree) -> Text:
    """Binary search over what is left; with probability ``teacher_noise`` a number from the whole range."""
    coin, pick = jax.random.split(key)
    low, high = _range(params)
    middle = state.low + (state.high - state.low) // 2
    noisy = jax.random.bernoulli(coin, jnp.clip(params.teacher_noise, 0.0, 1.0))
    return format_int(jnp.where(noisy, jax.random.randint(pick, (), low, high + 1), middle), _ACTION)


def guess(max_turns: int = 12) -> Environment:
    """A number in ``low..high`` is to be found: the last line of an action is a guess, one decimal integer.

    The first observation is ``guess LOW..HIGH``, the others say where the number lies from the guess: ``higher`` or
    ``lower``. Anything but an integer costs a turn and is answered by ``error: ...``. Reward 1 and the end when found;
    cut after ``max_turns``. Binary search needs at most ``floor(log2(high - low + 1)) + 1`` guesses (7 for 1..100). The
    anchor is what is left of the range, which all that was seen amounts to.

    Raises:
      ValueError: ``max_turns`` below 1.
    """
    if max_turns < 1:
        raise ValueError(f"guess: max_turns must be at least 1, got {max_turns}")
    info = (("success", "float32"), ("malformed", "float32"))
    return Environment(
        name="guess",
        version="1",
        spec=EnvSpec(_OBSERVATION, _ACTION, max_turns, info=info),
        params=Params(),
        reset=_reset,
        step=lambda key, state, action, params: _step(key, state, action, params, max_turns),
        expert=_expert,
        anchor=lambda state: hash_(_span(state.low, state.high, "")),
        privileged=lambda state: format_int(state.target, _ACTION),
    )
