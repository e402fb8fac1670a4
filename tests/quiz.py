"""The cheapest environment that reports every part: look up one of two letters, then say it.

An action is a letter. The first observation is the question, ``?``; the action ``c`` is a call, which is answered by
the letter to say; ``a`` or ``b`` answers, and ends the episode with reward 1 where it is right. Anything else is
malformed. Three turns at most.
"""

import jax
import jax.numpy as jnp
from tiny import CODEC, params

from agentrl_jax.envs import Environment, EnvSpec
from agentrl_jax.types import Text, TimeStep

TURNS = 3
PARTS = ("success", "tool_calls", "malformed", "answered")


def _text(byte):
    return Text(jnp.asarray(byte, jnp.uint8)[None], jnp.int32(1))


def _reset(key, params):
    del params
    letter = ord("a") + jax.random.bernoulli(key).astype(jnp.int32)
    return (letter, jnp.int32(0)), TimeStep(observation=_text(ord("?")))


def _step(key, state, action, params):
    del key, params
    letter, turn = state
    said = jnp.where(action.length == 1, action.data[0].astype(jnp.int32), 0)
    calls, answers = said == ord("c"), (said == ord("a")) | (said == ord("b"))
    right = answers & (said == letter)
    info = {"success": right, "tool_calls": calls, "malformed": ~calls & ~answers, "answered": answers}
    shown = _text(jnp.where(calls, letter, ord("!")))
    over = ~answers & (turn + 1 >= TURNS)
    return (letter, turn + 1), TimeStep(observation=shown, reward=right, terminated=answers, truncated=over, info=info)


def _expert(key, state, params):
    del key, params
    letter, turn = state
    return _text(jnp.where(turn == 0, ord("c"), letter))


ENV = Environment(
    "quiz", "1", EnvSpec(1, 2, TURNS, info=tuple((p, "float32") for p in PARTS)), (), _reset, _step, _expert,
    anchor=lambda state: (state[0] * 4 + state[1]).astype(jnp.uint32),
)  # fmt: skip


def fluent(seed: int = 0):
    """Parameters that mostly write one of the three letters, and end the action after it."""
    p = params(seed)
    bias = (
        jnp.full(CODEC.vocab_size, -6.0, jnp.float32)
        .at[jnp.asarray([ord(c) for c in "abc"])]
        .set(1.0)
        .at[CODEC.end_action]
        .set(1.5)
    )
    return p | {"bias": bias}
