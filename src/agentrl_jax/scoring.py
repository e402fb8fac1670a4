"""Scoring: what a model says of written tokens, under the rule they were sampled by.

Token ``t`` is scored from the hidden state at ``t - 1``, with the codec's mask of what may be sampled and the row's
temperature, so that with unchanged parameters the training pass gives the log-probabilities of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import sampling
from agentrl_jax.policy import Policy
from agentrl_jax.types import Array, Batch, PyTree, Score, Trajectory

_WHOLE = 1 << 24
"""Logits (elements) up to which the vocabulary is computed in one piece."""


class View(NamedTuple):
    """One scoring: by which model, and of which tokens.

    Attributes:
      model: key of ``TrainState.params``.
      tokens: ``(Batch) -> (int32[..., T2], offset int32[...])``, where ``traj.tokens[t]`` stands at ``t + offset``;
        None: the trajectory's own tokens.
      statistic: ``float32[M, V] -> [M]``, of the log-probabilities of all that could be written: ``Score.entropy``.
    """

    model: str = "policy"
    tokens: Callable[[Batch], tuple[Array, Array]] | None = None
    statistic: Callable[[Array], Array] = sampling.entropy


def collision(logp: Array) -> Array:
    """``sum p^2``, the chance that two draws agree: ``[..., V] -> [...]``; a ``View.statistic``."""
    return jnp.sum(jnp.exp(2.0 * logp), axis=-1)


def token_scores(
    policy: Policy,
    params: PyTree,
    tokens: Array,
    temperature: Array,
    *,
    allowed: Array | None = None,
    chunk: int | None = None,
    statistic: Callable[[Array], Array] = sampling.entropy,
) -> tuple[Array, Array, Array]:
    """``(logp [B, T], entropy [B, T], value [B, T + 1])`` of ``tokens [B, T]`` given what stands before them.

    ``logp[t] = log pi(tokens[t] | tokens[:t])``, 0 at position 0; ``value[t]`` is the value of ``tokens[:t]``. The
    vocabulary is never materialised for more
    than ``chunk`` tokens at once: chunks are recomputed in the backward pass.

    Args:
      policy: the model.
      params: its parameters.
      tokens: ``int32[B, T]``.
      temperature: ``float32[B]``.
      allowed: ``bool[V]``, what may be sampled.
      chunk: tokens whose logits exist at once; None: all when they are few, else 4096.
      statistic: see ``View``; in the place of the entropy.
    """
    out = policy.forward(params, tokens)
    batch, length, width = out.hidden.shape
    hidden = out.hidden[:, :-1].reshape(-1, width)
    targets = tokens[:, 1:].reshape(-1)
    scale = jnp.repeat(temperature, length - 1)

    def score(hidden, targets, scale):
        logp = sampling.log_probs(policy.logits(params, hidden), scale, allowed)
        # A one-hot select instead of a gather: its gradient is a select too, not a scatter.
        chosen = jnp.arange(logp.shape[-1], dtype=jnp.int32) == targets[:, None]
        return jnp.sum(jnp.where(chosen, logp, 0.0), axis=-1), statistic(logp)

    count = hidden.shape[0]
    if chunk is None:
        vocabulary = jax.eval_shape(policy.logits, params, hidden[:1]).shape[-1]
        chunk = count if count * vocabulary <= _WHOLE else 4096
    logp, entropy = _chunked(score, chunk, hidden, targets, scale)
    pad = lambda x: jnp.pad(x.reshape(batch, length - 1), ((0, 0), (1, 0)))  # noqa: E731
    value = jnp.pad(out.value.astype(jnp.float32), ((0, 0), (1, 0)))
    return pad(logp), pad(entropy), value


def _chunked(score: Callable, chunk: int, *arrays: Array) -> tuple[Array, Array]:
    count = arrays[0].shape[0]
    if chunk >= count:
        return score(*arrays)
    pieces = -(-count // chunk)
    grid = [jnp.pad(x, ((0, pieces * chunk - count),) + ((0, 0),) * (x.ndim - 1)) for x in arrays]
    grid = [x.reshape(pieces, chunk, *x.shape[1:]) for x in grid]
    logp, entropy = jax.lax.map(lambda a: jax.checkpoint(score)(*a), tuple(grid))
    return logp.reshape(-1)[:count], entropy.reshape(-1)[:count]


def score(
    policy: Policy,
    params: PyTree,
    view: View,
    batch: Batch,
    *,
    allowed: Array | None = None,
    chunk: int | None = None,
) -> Score:
    """Scores the written tokens of a batch with any leading axes; ``Score`` is aligned to ``batch.traj.tokens``.

    ``bootstrap`` is the value after the last token of the row (of the view's row, where the view has its own tokens).
    """
    traj = batch.traj
    tokens, offset = (traj.tokens, None) if view.tokens is None else view.tokens(batch)
    lead, width = tokens.shape[:-1], tokens.shape[-1]
    flat = tokens.reshape(-1, width)
    logp, entropy, value = token_scores(
        policy, params, flat, traj.temperature.reshape(-1), allowed=allowed, chunk=chunk, statistic=view.statistic
    )
    start = jnp.zeros(flat.shape[:1], jnp.int32) if offset is None else offset.reshape(-1)
    last = jnp.clip(start + traj.length.reshape(-1), 0, width)
    bootstrap = jnp.take_along_axis(value, last[:, None], axis=1)[:, 0]
    if offset is None:
        value = value[:, :-1]
    else:
        index = jnp.clip(start[:, None] + jnp.arange(traj.tokens.shape[-1], dtype=jnp.int32), 0, width - 1)
        logp, entropy, value = (jnp.take_along_axis(x, index, axis=1) for x in (logp, entropy, value))
    shape = lambda x: x.reshape(*lead, x.shape[-1])  # noqa: E731
    return Score(shape(logp), shape(entropy), shape(value), bootstrap.reshape(lead))


def as_batch(traj: Trajectory, mask: Array | None = None) -> Batch:
    """A batch that only carries ``traj``: every number zero, ``mask`` the sampled tokens unless it is given."""
    zero = jnp.zeros(traj.tokens.shape, jnp.float32)
    mask = traj.mask & ~traj.expert if mask is None else mask
    return Batch(traj, mask, zero, zero, zero, zero, zero, zero[..., 0], {})
