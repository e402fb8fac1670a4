"""The calculator as a tool of text environments: commands, replies and what is counted.

The last line of an action that is not blank is its command; what stands before it is reasoning, without effect.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from agentrl_jax import bigint
from agentrl_jax import text as tx
from agentrl_jax.expression import Status, evaluate
from agentrl_jax.types import Array, Text

CALL, ANSWER = b"calc ", b"answer "
# Indexed by the status of an evaluation; the first is for what is no command.
_ERRORS = tuple(
    b"error: " + e for e in (b"use calc or answer", b"malformed", b"division by zero", b"overflow", b"too long")
)
REPLY = max(bigint.CAPACITY, *map(len, _ERRORS))
"""Bytes that hold every reply."""
INFO = tuple((name, "float32") for name in ("success", "tool_calls", "malformed", "answered"))
"""``EnvSpec.info`` of an environment with this tool: the names of ``outcome``."""


class Reply(NamedTuple):
    """What the tool says to a command.

    Attributes:
      text: ``Text`` of ``REPLY`` bytes, the value or ``error: ...``.
      has_result: ``bool[]``, it is a value.
      parses: ``bool[]``, the command is a call whose expression parses.
    """

    text: Text
    has_result: Array
    parses: Array


def reply(command: Text, *, max_operators: int) -> Reply:
    """The reply to ``calc EXPR``; any other command, an answer too, is answered by an error."""
    calls = tx.startswith(command, CALL)
    # An empty expression for rows that do not call keeps them out of the evaluation loop.
    expression = tx.slice_(command, len(CALL), jnp.where(calls, command.length, 0))
    found = evaluate(expression, max_operators=max_operators)
    has_result = calls & (found.status == Status.OK)
    parses = calls & (found.status != Status.MALFORMED) & (found.status != Status.TOO_LONG)
    error = _error(jnp.where(calls, found.status, 0))
    return Reply(tx.where(has_result, bigint.to_text(found.value, REPLY), error), has_result, parses)


def outcome(success: Array, answered: Array, parses: Array) -> dict[str, Array]:
    """``TimeStep.info`` of a command; ``malformed`` is one that is neither an answer nor a call that parses."""
    return {"success": success, "tool_calls": parses, "malformed": ~answered & ~parses, "answered": answered}


def _error(index: Array) -> Text:
    texts = [tx.literal(error, REPLY) for error in _ERRORS]
    data, length = np.stack([t.data for t in texts]), np.stack([t.length for t in texts])
    return Text(jnp.take(data, index, axis=0, mode="clip"), jnp.take(length, index, mode="clip"))
