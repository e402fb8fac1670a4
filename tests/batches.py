"""Made-up trajectories and batches for the tests of what comes after the rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CODEC

from agentrl_jax import scoring
from agentrl_jax.algorithm import Tools
from agentrl_jax.types import Batch, Score, Trajectory


def trajectory(mask, *, reward=None, group=None, segments=1, truncated=None, expert=None, logp=None, seed=0, turns=2):
    """Rows with random tokens; a row's length ends with its last written token. Everything lies in NumPy's hands."""
    mask = np.asarray(mask, bool)
    count, width = mask.shape
    rng = np.random.default_rng(seed)
    grid = lambda x, dtype: jnp.asarray(np.zeros(mask.shape) if x is None else x, dtype)  # noqa: E731
    length = np.where(mask.any(1), width - mask[:, ::-1].argmax(1), 0)
    real = np.arange(width) < length[:, None]
    per_row = lambda x: jnp.asarray(np.zeros(count) if x is None else x)  # noqa: E731
    episode = np.arange(count) // segments
    group = np.zeros(count // segments) if group is None else np.asarray(group)
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return Trajectory(
        tokens=whole(np.where(real, rng.integers(0, 256, mask.shape), CODEC.pad)),
        mask=jnp.asarray(mask),
        expert=grid(expert, bool),
        logp=grid(logp, jnp.float32),
        reward=grid(reward, jnp.float32),
        turn=whole(np.where(real, 0, -1)),
        length=whole(length),
        terminated=~per_row(truncated).astype(bool),
        truncated=per_row(truncated).astype(bool),
        task=whole(group[episode]),
        group=whole(group[episode]),
        episode=whole(episode),
        role=whole(np.zeros(count)),
        segment=whole(np.arange(count) % segments),
        version=whole(np.zeros(count)),
        parent=whole(np.full(count, -1)),
        branch=whole(np.full(count, -1)),
        temperature=jnp.ones(count),
        steps={
            "played": jnp.ones((count, turns), bool),
            "reward": jnp.zeros((count, turns)).at[:, 0].set(jnp.sum(grid(reward, jnp.float32), axis=1)),
        },
    )


def masks(lengths, width, seed=0):
    """A prompt of two tokens, then written ones with a few observations between them, up to each length."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((len(lengths), width)) < 0.7) & (np.arange(width) >= 2)
    for row, n in zip(mask, lengths, strict=True):
        row[n:] = False
        if n > 2:
            row[n - 1] = True
    return mask


def batch(traj: Trajectory, seed: int = 0) -> Batch:
    """Every number random, the sampled tokens counted."""
    keys = jax.random.split(jax.random.key(seed), 6)
    draw = lambda i: jax.random.normal(keys[i], traj.tokens.shape)  # noqa: E731
    logp_old, value = -5.0 + 0.3 * draw(0), draw(1)
    return scoring.as_batch(traj)._replace(
        adv=draw(2), target=draw(3), logp_old=logp_old, value=value, extra={"logp_ref": logp_old + 0.1 * draw(4)}
    )


def tools(traj: Trajectory, *, groups=1, segments=1, single=True, scores=None, group_size=1) -> Tools:
    """Tools that score by the given function of a view's model."""

    def no_roll(*args, **kwargs):
        raise AssertionError("nothing to roll here")

    def score(view, of):
        return Score(*(jnp.zeros(of.traj.tokens.shape),) * 3, jnp.zeros(of.traj.length.shape))

    return Tools(
        no_roll, scores or score, traj.tokens.shape[0] // segments, group_size, groups, segments, single,
        traj.tokens.shape[1], traj.steps["played"].shape[1], CODEC,
    )  # fmt: skip
