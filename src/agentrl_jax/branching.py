"""Branching: rollouts that continue from the middle of a trajectory, token stream and environment state alike.

``rollout(..., record=lambda state: state)`` keeps what ``branch`` needs; what it returns is the ``start`` of another
rollout. Rows whose context restarts (``segments > 1``) are not branched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from agentrl_jax.envs.base import Environment, canonical_params
from agentrl_jax.types import Array, Prefix, PyTree, Start, Trajectory

_TOKENS = ("tokens", "mask", "expert", "logp", "reward", "turn")
_NUMBERS = ("length", "written", "turns", "began", "parent", "branch")


def turn_starts(traj: Trajectory) -> Array:
    """Where the agent begins to write in every turn: ``int32[B, K]``; -1 in a turn it wrote nothing in.

    An action that ``max_tokens`` cut was begun, though it was never played.
    """
    number, width = traj.steps["played"].shape[1], traj.tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)
    inside = (traj.turn[:, None] == jnp.arange(number)[:, None]) & traj.mask[:, None]
    first = jnp.min(jnp.where(inside, index, width), axis=2)
    return jnp.where(first < width, first, -1)


def branch(traj: Trajectory, row: Array, token: Array) -> Start:
    """Episodes that share a row of ``traj`` below a token, and write their own from there on.

    The token lies in an action that the agent wrote; its first one is a turn boundary (``turn_starts``). Kept are the
    tokens below it with all that was noted of them, the turns before its turn, and the environment's state before its
    action. Task, group and temperature are the row's; ``_replace`` changes them (groups must be below the number of
    branches), and gives episodes ``params`` of their own. ``active`` is False where ``row`` or ``token`` is out of
    range, or the token none of the agent's: nothing is played there.

    The branches are new episodes: with another key, or other ids, than the row's they draw new tokens, and the
    environment new outcomes. Played greedily in an environment without chance, a branch repeats its row.

    Args:
      traj: rows of one context each, with the whole environment state as their record, ``max_tokens`` as they go on.
      row: ``int32[N]``, index into its rows: what ``Trajectory.parent`` of a branch says.
      token: ``int32[N]``, the first own token, ``Trajectory.branch``.

    Raises:
      ValueError: no record; rows of several segments; ``row`` and ``token`` that are not ``[N]`` both.
    """
    if traj.record is None:
        raise ValueError("branch needs the states that traj.record keeps: roll with record=lambda state: state")
    if not isinstance(traj.segment, Tracer) and np.any(traj.segment):
        raise ValueError("branch continues rows of one context: roll with segments=1")
    row, token = jnp.asarray(row, jnp.int32), jnp.asarray(token, jnp.int32)
    if row.ndim != 1 or row.shape != token.shape:
        raise ValueError(f"row and token must have one shape (N,), got {row.shape} and {token.shape}")
    count, width = traj.tokens.shape
    inside = (row >= 0) & (row < count) & (token >= 0) & (token < width)
    row, token = jnp.clip(row, 0, count - 1), jnp.clip(token, 0, width - 1)
    active = inside & traj.mask[row, token] & (traj.segment[row] == 0)
    turns = jnp.where(active, traj.turn[row, token], 0)
    mask, turn = traj.mask[row], traj.turn[row]
    upto = lambda x, last: _where(jnp.arange(x.shape[1]) <= last[:, None], x)  # noqa: E731
    prefix = Prefix(
        **{name: getattr(traj, name)[row] for name in _TOKENS},
        length=jnp.where(active, token, 0),
        written=jnp.sum(mask & (jnp.arange(width) < token[:, None]), axis=1, dtype=jnp.int32),
        turns=turns,
        began=jnp.argmax(mask & (turn == turns[:, None]), axis=1).astype(jnp.int32),
        steps={name: upto(x[row], turns - (name != "anchor")) for name, x in traj.steps.items()},
        record=jax.tree.map(lambda x: upto(x[row], turns), traj.record),
        env=jax.tree.map(lambda x: x[row, turns], traj.record),
        parent=row,
        branch=token,
    )
    return Start(traj.task[row], traj.group[row], active, temperature=traj.temperature[row], prefix=prefix)


def _where(mask: Array, x: Array, other: Any = 0) -> Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.asarray(other, x.dtype))


def settle(prefix: Prefix, active: Array, pad: int, budget: int, max_turns: int) -> tuple[Prefix, Array]:
    """``(prefix, active)``: nothing stands at or beyond ``length``, and what cannot be continued is not played.

    Continued is a row with room for a token, whose open action is within its ``budget`` (tokens, the end marker
    included) and below ``max_turns``.
    """
    length, turns, began = prefix.length, prefix.turns, prefix.began
    fits = (length > 0) & (length < prefix.tokens.shape[1]) & (turns >= 0) & (turns < max_turns)
    fits &= (began > 0) & (began <= length) & (length - began < budget)
    real = jnp.arange(prefix.tokens.shape[1]) < length[:, None]
    blank = {"tokens": pad, "turn": -1}
    kept = {name: _where(real, getattr(prefix, name), blank.get(name, 0)) for name in _TOKENS}
    active &= fits | (length == 0)
    lineage = {name: jnp.where(active & fits, getattr(prefix, name), -1) for name in ("parent", "branch")}
    return prefix._replace(**kept, **lineage), active


def check_prefix(prefix: Prefix, env: Environment, names: Iterable[str], episodes: int, max_tokens: int) -> None:
    """Refuses a prefix that does not fit a rollout of ``env``, before anything is compiled.

    Raises:
      ValueError: another type, a step of ``names`` that is missing, a shape or a dtype that differs.
    """
    if not isinstance(prefix, Prefix):
        raise ValueError(f"start.prefix must be a Prefix, as branching.branch makes it, got {type(prefix).__name__}")
    missing = sorted(set(names) - set(prefix.steps))
    if missing:
        raise ValueError(f"start.prefix.steps lacks {missing}: branch a trajectory of the same environment")
    for name in _TOKENS:
        _check_shape(f"start.prefix.{name}", getattr(prefix, name), (episodes, max_tokens))
    for name in _NUMBERS:
        _check_shape(f"start.prefix.{name}", getattr(prefix, name), (episodes,))
    for name in names:
        _check_shape(f"start.prefix.steps[{name!r}]", prefix.steps[name], (episodes, env.spec.max_turns))
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda k: env.reset(k, canonical_params(env.params))[0], key)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((episodes, *x.shape), x.dtype), state)
    _check_tree("start.prefix.env", f"the state of {env.name} (record=lambda state: state)", prefix.env, state)


def check_record(prefix: Prefix, kept: PyTree, max_turns: int) -> None:
    """Refuses a prefix without the earlier part of what the rollout records, ``kept [N, ...]`` (shapes) at a time.

    Raises:
      ValueError: no record, or one of another structure, shape or dtype.
    """
    if prefix.record is None:
        raise ValueError("start.prefix.record must be given, since the rollout keeps a record")
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], max_turns + 1, *x.shape[1:]), x.dtype), kept)
    _check_tree("start.prefix.record", "what record= keeps of every state", prefix.record, whole)


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if jnp.shape(x) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {jnp.shape(x)}")


def _check_tree(name: str, what: str, tree: PyTree, like: PyTree) -> None:
    """Structure, shapes and dtypes."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise ValueError(f"{name} must be {what}, {jax.tree.structure(like)}, got {jax.tree.structure(tree)}")
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(like), strict=True)
    for (path, x), other in pairs:
        found, wanted = (jnp.shape(x), jnp.result_type(x)), (other.shape, other.dtype)
        if found != wanted:
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} must be {what}, {wanted}, got {found}")
