"""Advantages along one episode: returns to go, generalised advantage estimation, V-trace, turn-level estimators.

Everything here is unbatched: arrays are ``[T]``, and ``jax.vmap`` makes a batch. A step is a written token (in the
``turn_*`` functions a turn).

**The carry rule.** A recursion skips tokens the agent did not write as if they were deleted: they are no steps, cost
no discount, and what stands in ``value`` there is never read. A reward found on such a token belongs to the written
token before it, or to the first written one when none is before it; it is never lost, unless the agent wrote
nothing at all. (A reward that is not finite on a token that was not written is taken as padding.)

Rows of one episode laid end to end are one episode: only its last row bootstraps. ``bootstrap`` is the value after
the last token where a limit cut the episode (truncation), and 0 where the task was over (termination).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax.masked import as_float, fill
from agentrl_jax.types import Array

_UNROLL = 8


def place_reward(reward: Array, mask: Array) -> Array:
    """Moves every reward to the written token that earned it.

    ``[T], bool[T] -> [T]``: the written token at or before it, or the first written token when there is none. The sum
    is kept unless nothing was written, which gives zeros.
    """
    mask = jnp.asarray(mask).astype(bool)
    reward = as_float(reward)
    reward = jnp.where(mask | jnp.isfinite(reward), reward, 0.0)
    index = jnp.arange(mask.shape[0])
    before = jax.lax.cummax(jnp.where(mask, index, -1))
    owner = jnp.where(before >= 0, before, jnp.argmax(mask))
    return fill(jax.ops.segment_sum(reward, owner, mask.shape[0]), mask)


def discounted_return(reward: Array, mask: Array, *, discount: Array | float, bootstrap: Array | float = 0.0) -> Array:
    """Returns to go: ``G_k = r_k + discount * G_{k+1}`` over written tokens, ``G`` after the last = ``bootstrap``.

    Args:
      reward: ``[T]``; see the carry rule above.
      mask: ``bool[T]``, written tokens.
      discount: scalar, or ``[T]`` for one per step.
      bootstrap: scalar, value after the last token.

    Returns:
      ``[T]``, 0 where nothing was written. No gradient flows through it.
    """
    mask = jnp.asarray(mask).astype(bool)
    reward = place_reward(reward, mask)
    decay = jnp.where(mask, discount, 1.0)
    ret = _backward(reward, decay, jnp.asarray(bootstrap, reward.dtype))
    return jax.lax.stop_gradient(fill(ret, mask))


def gae(
    reward: Array,
    value: Array,
    mask: Array,
    *,
    discount: Array | float,
    lambda_: Array | float,
    bootstrap: Array | float = 0.0,
) -> tuple[Array, Array]:
    """Generalised advantage estimation over written tokens.

    ``delta_k = r_k + discount * V_{k+1} - V_k`` and ``A_k = delta_k + discount * lambda_ * A_{k+1}``; the target is
    ``A_k + V_k``, taken before any whitening. ``V`` after the last written token is ``bootstrap``.

    Args:
      reward: ``[T]``; see the carry rule above.
      value: ``[T]``, the critic before the token is written; read at written tokens only.
      mask: ``bool[T]``, written tokens.
      discount, lambda_: scalars, or ``[T]`` for one per step.
      bootstrap: scalar, value after the last token.

    Returns:
      ``(adv, target)``, ``[T]`` each, 0 where nothing was written. No gradient flows through them.

    Source: Schulman et al., High-Dimensional Continuous Control Using GAE, 2015, arXiv 1506.02438. The step from the
    last token of one action to the first of the next is one step, as in verl, AReaL and tunix.
    """
    mask = jnp.asarray(mask).astype(bool)
    value = fill(value, mask)
    after = _next_value(value, mask, bootstrap)
    delta = fill(place_reward(reward, mask) + discount * after - value, mask)
    adv = fill(_backward(delta, jnp.where(mask, discount * lambda_, 1.0), jnp.zeros((), delta.dtype)), mask)
    return jax.lax.stop_gradient((adv, fill(adv + value, mask)))


def _backward(x: Array, decay: Array, last: Array) -> Array:
    """``y_t = x_t + decay_t * y_{t+1}`` with ``y_T = last``; sequential, so inserted no-ops change no bit."""

    def step(carry, inputs):
        here, factor = inputs
        carry = here + factor * carry
        return carry, carry

    decay = jnp.broadcast_to(decay, x.shape).astype(x.dtype)
    return jax.lax.scan(step, last.astype(x.dtype), (x, decay), reverse=True, unroll=_UNROLL)[1]


def _next_value(value: Array, mask: Array, bootstrap: Array | float) -> Array:
    """The value at the next written token, ``bootstrap`` after the last one: ``[T]``."""
    size = mask.shape[0]
    index = jnp.where(mask, jnp.arange(size), size)
    following = jnp.concatenate([jax.lax.cummin(index, reverse=True)[1:], jnp.full((1,), size, index.dtype)])
    padded = jnp.concatenate([value, jnp.reshape(jnp.asarray(bootstrap, value.dtype), (1,))])
    return padded[following]
