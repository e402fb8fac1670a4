"""A ring buffer of rows worth training on, and the part that plays them again."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import metrics as metrics_lib
from agentrl_jax import scoring, selection
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.checks import check_at_least
from agentrl_jax.masked import masked_mean
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics, PyTree

_NEEDS = frozenset({"logp_old", "scores", "one_segment"})

_UNMARKED = {"importance": 1.0, "entropy": 0.0, "held": 0, "correct": 0}
"""What other stages leave in ``Batch.extra``, as it is for a stored row."""


class Rows(NamedTuple):
    """Rows as they were when they were sampled; fields of ``Trajectory`` unless said otherwise, ``M`` of them.

    Attributes:
      tokens, turn: ``int32[M, T]``.
      mask: ``bool[M, T]``, of the loss (``Batch.mask``).
      written, expert: ``bool[M, T]``, ``Trajectory.mask`` and ``Trajectory.expert``.
      logp, adv, reward: ``float32[M, T]``: of the policy that sampled them, and its advantages.
      length, task, version: ``int32[M]``.
      temperature: ``float32[M]``.
      terminated, truncated: ``bool[M]``.
    """

    tokens: Array
    turn: Array
    mask: Array
    written: Array
    expert: Array
    logp: Array
    adv: Array
    reward: Array
    length: Array
    task: Array
    version: Array
    temperature: Array
    terminated: Array
    truncated: Array


class Buffer(NamedTuple):
    """``rows``: ``capacity`` of them. ``filled``: how many hold something; ``cursor``: the next to be overwritten,
    ``int32[]``."""

    rows: Rows
    filled: Array
    cursor: Array


def empty(capacity: int, max_tokens: int) -> Buffer:
    """A buffer without rows.

    Raises:
      ValueError: ``capacity`` or ``max_tokens`` below 1.
    """
    check_at_least(1, capacity=capacity, max_tokens=max_tokens)
    grid = lambda dtype: jnp.zeros((capacity, max_tokens), dtype)  # noqa: E731
    row = lambda dtype: jnp.zeros(capacity, dtype)  # noqa: E731
    whole, number, flag = jnp.int32, jnp.float32, jnp.bool_
    rows = Rows(
        tokens=grid(whole), turn=grid(whole), mask=grid(flag), written=grid(flag), expert=grid(flag),
        logp=grid(number), adv=grid(number), reward=grid(number), length=row(whole), task=row(whole),
        version=row(whole), temperature=row(number), terminated=row(flag), truncated=row(flag),
    )  # fmt: skip
    return Buffer(rows, jnp.zeros((), whole), jnp.zeros((), whole))


def rows_of(batch: Batch) -> Rows:
    """The rows of a batch of rows, ``[B, T]``."""
    traj = batch.traj
    return Rows(
        tokens=traj.tokens, turn=traj.turn, mask=batch.mask, written=traj.mask, expert=traj.expert, logp=traj.logp,
        adv=jnp.where(batch.mask, batch.adv, 0.0), reward=traj.reward, length=traj.length, task=traj.task,
        version=traj.version, temperature=traj.temperature, terminated=traj.terminated, truncated=traj.truncated,
    )  # fmt: skip


def push(buffer: Buffer, batch: Batch, where: Array) -> Buffer:
    """Writes the rows ``where``, ``bool[B]``, in order over the oldest ones; of more than ``capacity`` the last."""
    capacity = buffer.rows.length.shape[0]
    count = jnp.sum(where, dtype=jnp.int32)
    rank = jnp.cumsum(where, dtype=jnp.int32) - 1
    kept = where & (rank >= count - capacity)
    # Out of range is dropped.
    place = jnp.where(kept, (buffer.cursor + rank) % capacity, capacity)
    rows = jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), buffer.rows, rows_of(batch))
    return Buffer(rows, jnp.minimum(buffer.filled + count, capacity), (buffer.cursor + count) % capacity)


def magnitude(rows: Rows) -> Array:
    """``|A|`` of a row, ``float32[M]``: the mean over its loss tokens; exactly 0 for a row without any."""
    return masked_mean(jnp.abs(rows.adv), rows.mask, axis=1)


def draw(buffer: Buffer, key: Array, count: int) -> Rows:
    """``count`` stored rows with replacement, by ``selection.replay_probability``; zeros from an empty buffer."""
    capacity = buffer.rows.length.shape[0]
    chance = selection.replay_probability(magnitude(buffer.rows), jnp.arange(capacity) < buffer.filled)
    index = jax.random.choice(key, capacity, (count,), p=chance)
    return jax.tree.map(lambda x: x[index], buffer.rows)


def replay(capacity: int, share: float = 0.5) -> Part:
    """Skywork's selective sample buffer: rows that teach nothing make way for stored ones that did.

    A stage, the last one: rows of the batch all of whose advantages are 0, at most ``hyper["replay_share"]`` of the
    batch (rounded down), become rows drawn from the buffer, with chances proportional to ``|A|``, their stored
    advantages, masks and behaviour log-probabilities; then the batch's own rows with an advantage are stored.
    ``logp_old`` of a stored row is what it was sampled with (0 on tokens of the expert's), so that ratios correct for
    its age; the batch's own rows keep what an earlier stage scored. Metrics: ``replay_share`` (of the batch's rows) and
    ``replay_age`` (steps since a replayed row was sampled).

    What is drawn keeps the place, group and episode of the row it replaces, so no stage that compares members of a
    group may follow. Of what other stages left in ``extra``, ``logp_ref`` is scored again, and stored rows have an
    ``importance`` of 1 and no marks; anything else would be that of the row before. Rows with an advantage that is not
    finite are not stored. Values and targets are not stored, so it does not serve a critic. The rule of drawing and the
    share are unconfirmed. Source: Wang et al., Skywork R1V2, 2025, arXiv 2504.16656.

    Args:
      capacity: rows kept, of ``max_tokens`` each.
      share: default of ``replay_share``.

    Raises:
      ValueError: ``capacity`` below 1, ``share`` outside [0, 1]; when traced, a batch with other names in ``extra``.
    """
    check_at_least(1, capacity=capacity)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be in [0, 1], got {share}")

    def init(key: Array, shape: Shape) -> Buffer:
        del key
        return empty(capacity, shape.max_tokens)

    def stage(
        memory: Buffer, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        unknown = sorted(set(batch.extra) - {*_UNMARKED, "logp_ref"})
        if unknown:
            raise ValueError(f"replay cannot tell {unknown} of the rows it stores: leave out what makes them")
        own = rows_of(batch)
        replaced = _replaceable(own, memory.filled, hyper["replay_share"])
        fresh, now = batch, jnp.max(batch.traj.version)
        batch = _put(batch, draw(memory, key, own.length.shape[0]), replaced)
        if "logp_ref" in batch.extra:
            logp_ref = tools.score(scoring.View("reference"), batch).logp
            batch = batch._replace(extra={**batch.extra, "logp_ref": logp_ref})
        finite = jnp.all(jnp.isfinite(own.adv), axis=1)
        memory = push(memory, fresh, finite & (magnitude(own) > 0))
        age = (now - batch.traj.version).astype(jnp.float32)
        everyone = jnp.ones_like(replaced)
        metrics = {
            "replay_share": metrics_lib.masked(replaced.astype(jnp.float32), everyone),
            "replay_age": metrics_lib.masked(age, replaced),
        }
        return memory, batch, metrics

    return Part("replay", stage, hyper={"replay_share": share}, needs=_NEEDS, init=init)


def _replaceable(rows: Rows, filled: Array, share: Array) -> Array:
    """The first rows without an advantage, as many as the share allows, ``bool[B]``; none while nothing is stored."""
    idle = magnitude(rows) == 0
    room = jnp.floor(share * idle.shape[0] + 1e-4)
    return idle & (jnp.cumsum(idle) <= room) & (filled > 0)


def _put(batch: Batch, rows: Rows, where: Array) -> Batch:
    """``rows`` in the places ``where``, ``bool[B]``; what a step of the environment said of the old ones is blanked."""
    pick = lambda new, old: jnp.where(where.reshape(-1, *[1] * (old.ndim - 1)), new, old)  # noqa: E731
    traj = batch.traj
    traj = traj._replace(
        mask=pick(rows.written, traj.mask),
        steps={k: pick(jnp.zeros_like(v), v) for k, v in traj.steps.items()},
        **{
            name: pick(getattr(rows, name), getattr(traj, name))
            for name in (
                "tokens", "turn", "expert", "logp", "reward", "length", "task", "version", "temperature",
                "terminated", "truncated",
            )
        },
    )  # fmt: skip
    extra = {k: pick(jnp.full_like(v, _UNMARKED[k]), v) if k in _UNMARKED else v for k, v in batch.extra.items()}
    return batch._replace(
        traj=traj, mask=pick(rows.mask, batch.mask), adv=pick(rows.adv, batch.adv), extra=extra,
        logp_old=pick(rows.logp, batch.logp_old),
    )  # fmt: skip
