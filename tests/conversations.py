"""Made-up episodes of several turns with every number random, and the same episodes in other shapes.

A turn is a block of six tokens: an observation of two, then one to four written ones, then observation text up to the
end of the block. Rewards, anchors and parts are random; each episode plays one to four turns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from batches import trajectory
from tiny import CODEC

from agentrl_jax import scoring
from agentrl_jax.algorithm import Tools
from agentrl_jax.types import Batch, Score

BLOCK, TURNS = 6, 4
T = BLOCK * TURNS


def conversations(seed: int = 0, *, groups=(0, 0, 0, 1, 1, 1, 2, 2), expert=()) -> Batch:
    """A batch of one row an episode; episodes in ``expert`` were written by the expert."""
    rng = np.random.default_rng(seed)
    n = len(groups)
    turns = rng.integers(1, TURNS + 1, n)
    mask = np.zeros((n, T), bool)
    turn = np.full((n, T), -1)
    for i in range(n):
        for k in range(turns[i]):
            start = k * BLOCK
            mask[i, start + 2 : start + 3 + rng.integers(0, 4)] = True
            turn[i, start : start + BLOCK] = k
    length = turns * BLOCK
    played = np.arange(TURNS) < turns[:, None]
    paid = rng.integers(0, 2, (n, TURNS)) * played
    reward = np.zeros((n, T))
    for i in range(n):
        for k in range(turns[i]):
            reward[i, np.flatnonzero(mask[i] & (turn[i] == k))[-1]] = paid[i, k]
    traj = trajectory(mask, reward=reward, group=groups, truncated=rng.integers(0, 2, n), turns=TURNS)
    flag = lambda: jnp.asarray(rng.integers(0, 2, (n, TURNS)) * played, jnp.float32)  # noqa: E731
    steps = {
        "played": jnp.asarray(played), "reward": jnp.asarray(paid, jnp.float32),
        "anchor": jnp.asarray(rng.integers(0, 3, (n, TURNS)) * played, jnp.uint32), "tool_calls": flag(),
        "malformed": flag(), "answered": flag(),
        "success": jnp.asarray((np.arange(TURNS) == turns[:, None] - 1) * rng.integers(0, 2, (n, 1)), jnp.float32),
    }  # fmt: skip
    by = np.isin(np.arange(n), expert)[:, None] & mask
    traj = traj._replace(
        turn=jnp.asarray(turn, jnp.int32), length=jnp.asarray(length, jnp.int32), steps=steps,
        logp=jnp.asarray(np.where(mask & ~by, -rng.random((n, T)), 0), jnp.float32), expert=jnp.asarray(by),
    )  # fmt: skip
    draw = lambda: jnp.asarray(rng.normal(size=(n, T)), jnp.float32)  # noqa: E731
    b = scoring.as_batch(traj, traj.mask)._replace(
        logp_old=jnp.asarray(-rng.random((n, T)), jnp.float32), value=draw(),
        bootstrap=jnp.asarray(rng.normal(size=n), jnp.float32),
        extra={"entropy": jnp.abs(draw()), "logp_ref": jnp.asarray(-rng.random((n, T)), jnp.float32)},
    )  # fmt: skip
    return b._replace(adv=jnp.where(b.mask, jnp.asarray(rng.normal(size=(n, 1)), jnp.float32), 0.0))


def tools_of(b: Batch, *, segments: int = 1, score=None) -> Tools:
    """Tools of the batch's sizes, which score by ``score``."""

    def no_roll(*args, **kwargs):
        raise AssertionError("nothing to roll here")

    def scored(view, of):
        return Score(of.logp_old, jnp.zeros_like(of.logp_old), of.value, of.bootstrap)

    rows, width = b.mask.shape
    groups = int(np.max(np.asarray(b.traj.group))) + 1
    return Tools(
        no_roll, score or scored, rows // segments, rows // segments, groups, segments, False, segments * width, TURNS,
        CODEC,
    )  # fmt: skip


def run(part, b: Batch, *, segments: int = 1, key: int = 0, memory=None, tools=None, **hyper):
    """``(batch, metrics)`` of a part's stage."""
    tools = tools_of(b, segments=segments) if tools is None else tools
    memory = part.init(jax.random.key(9), None) if memory is None else memory
    numbers = {k: jnp.float32(v) for k, v in (dict(part.hyper) | hyper).items()}
    # Op by op: what is compiled for one part serves the others.
    _, out, metrics = part.stage(memory, b, tools, numbers, jax.random.key(key))
    return out, metrics


def split(b: Batch) -> Batch:
    """The same episodes with their context restarted after two turns: two rows each, of half the width."""
    n, half = b.mask.shape[0], T // 2

    def rows(x):
        return x.reshape(n, 2, half).reshape(2 * n, half) if x.shape == (n, T) else jnp.repeat(x, 2, axis=0)

    out = jax.tree.map(rows, b)
    length = jnp.clip(jnp.repeat(b.traj.length, 2) - jnp.tile(jnp.asarray([0, half]), n), 0, half)
    second = jnp.tile(jnp.asarray([False, True]), n)
    whole = jnp.repeat(b.traj.length, 2)
    last = jnp.where(whole > half, second, ~second)
    here = (jnp.arange(TURNS) >= TURNS // 2) == second[:, None]
    steps = {k: jnp.where(here, jnp.repeat(v, 2, axis=0), jnp.zeros((), v.dtype)) for k, v in b.traj.steps.items()}
    traj = out.traj._replace(
        length=length, steps=steps, segment=second.astype(jnp.int32), truncated=out.traj.truncated & last,
        terminated=out.traj.terminated & last, episode=jnp.repeat(b.traj.episode, 2),
    )  # fmt: skip
    return out._replace(traj=traj)


def joined(x):
    """Rows of ``split`` laid end to end again: ``[2 N, T / 2] -> [N, T]``."""
    return np.asarray(x).reshape(-1, T)


def with_gap(b: Batch, at: int = 4, width: int = 3) -> tuple[Batch, np.ndarray]:
    """The batch with ``width`` observation tokens, and garbage in every number of theirs, put in at ``at``; and where
    the old tokens are."""
    n = b.mask.shape[0]
    keep = np.r_[np.arange(at), np.arange(at, T) + width]

    def widen(x):
        if x.shape != (n, T):
            return x
        junk = {"b": False, "i": 5, "f": np.nan}[x.dtype.kind]
        out = np.full((n, T + width), junk, x.dtype)
        out[:, keep] = x
        return jnp.asarray(out)

    out = jax.tree.map(widen, b)
    turn = np.asarray(out.traj.turn).copy()
    turn[:, at : at + width] = turn[:, at + width : at + width + 1]
    traj = out.traj._replace(
        turn=jnp.asarray(turn), length=b.traj.length + width, reward=jnp.nan_to_num(out.traj.reward),
        logp=jnp.nan_to_num(out.traj.logp),
    )  # fmt: skip
    return out._replace(traj=traj), keep


def order(b: Batch, index) -> Batch:
    """The episodes in another order."""
    return jax.tree.map(lambda x: x[jnp.asarray(index)], b)
