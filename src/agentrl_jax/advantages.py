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

_UNROLL = 4


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
    """``y_t = x_t + decay_t * y_{t+1}`` with ``y_T = last``."""

    def step(carry, inputs):
        here, factor = inputs
        carry = here + factor * carry
        return carry, carry

    decay = jnp.broadcast_to(decay, x.shape).astype(x.dtype)
    return jax.lax.scan(step, last.astype(x.dtype), (x, decay), reverse=True, unroll=_UNROLL)[1]


def _next_value(value: Array, mask: Array, bootstrap: Array | float) -> Array:
    """The value at the next written token, ``bootstrap`` after the last one: ``[T]``."""
    padded = jnp.concatenate([value, jnp.reshape(jnp.asarray(bootstrap, value.dtype), (1,))])
    return padded[_following(mask)]


def _following(mask: Array) -> Array:
    """The index of the next written token, ``T`` after the last one: ``bool[T] -> int32[T]``."""
    size = mask.shape[0]
    index = jnp.where(mask, jnp.arange(size), size)
    return jnp.concatenate([jax.lax.cummin(index, reverse=True)[1:], jnp.full((1,), size, index.dtype)])


def decoupled_gae(
    reward: Array,
    value: Array,
    mask: Array,
    *,
    discount: Array | float,
    lambda_policy: Array | float,
    lambda_critic: Array | float = 1.0,
    bootstrap: Array | float = 0.0,
) -> tuple[Array, Array]:
    """Advantages with one lambda, value targets with another: ``gae`` twice, ``[T]`` each.

    VC-PPO (Yuan et al., 2025, arXiv 2503.01491) uses .95 for the policy; VAPO (Yue et al., 2025, 2504.05118) uses
    ``length_adaptive_lambda``. ``lambda_critic=1`` makes the targets returns to go.
    """
    adv, _ = gae(reward, value, mask, discount=discount, lambda_=lambda_policy, bootstrap=bootstrap)
    _, target = gae(reward, value, mask, discount=discount, lambda_=lambda_critic, bootstrap=bootstrap)
    return adv, target


def length_adaptive_lambda(length: Array, *, alpha: Array | float = 0.05) -> Array:
    """VAPO's ``lambda(l) = 1 - 1 / (alpha * l)`` for ``l`` written tokens, any shape, clamped to [0, 1].

    The clamp is ours: the formula is negative for ``l < 1 / alpha`` (20 tokens at the default). Length 0 gives 0.
    Source: Yue et al., VAPO, 2025, arXiv 2504.05118, from a secondary source; there is no official code.
    """
    length = as_float(length)
    return jnp.clip(1.0 - 1.0 / jnp.maximum(alpha * length, 1e-6), 0.0, 1.0)


def turn_ends(mask: Array, turn: Array) -> Array:
    """The last written token of every turn: ``bool[T], int32[T] -> bool[T]``.

    A turn without written tokens has no end. Turns come from the explicit ids, never from where rewards are.
    """
    mask = jnp.asarray(mask).astype(bool)
    size, following = mask.shape[0], _following(mask)
    return mask & ((following == size) | (turn[jnp.minimum(following, size - 1)] != turn))


def turn_gae(
    reward: Array,
    value: Array,
    mask: Array,
    turn: Array,
    *,
    discount: Array | float,
    lambda_: Array | float,
    token_discount: Array | float = 1.0,
    token_lambda: Array | float | None = None,
    bilevel: bool = False,
    bootstrap: Array | float = 0.0,
) -> tuple[Array, Array]:
    """GAE over turns, optionally refined over the tokens of each turn.

    With ``e_k`` the last written token of turn k, ``V_k = value[e_k]`` and ``r_k`` the rewards earned in the turn::

      delta_k = r_k + discount * V_{k+1} - V_k,    A_k = delta_k + discount * lambda_ * A_{k+1}

    Turn-wise, every token of turn k gets ``A_k``; only ``e_k`` has a target of its own, ``A_k + V_k``. Bi-level, each
    turn then runs GAE over its own tokens with ``token_discount`` and ``token_lambda``, the reward ``A_k + V_k`` at
    ``e_k``, no other reward, and no bootstrap past ``e_k``; so the advantage at ``e_k`` is ``A_k`` again.

    Args:
      reward, value, mask: as in ``gae``.
      turn: ``int32[T]``, explicit turn ids; read at written tokens only.
      discount, lambda_: scalars, per turn. VAGEN: .95 and 1 bi-level; 1 and 1 turn-wise.
      token_discount, token_lambda: scalars, per token within a turn; ``token_lambda`` is ``lambda_`` by default.
      bilevel: static.
      bootstrap: scalar, value after the last turn.

    Returns:
      ``(adv, target)``, ``[T]`` each, 0 where nothing was written. Turn-wise, the target of a token inside a turn is
      its own value, so that it asks for nothing; keep such tokens out of the value loss with ``turn_ends``.

    An episode of one turn: turn-wise ``R - V[e]`` everywhere, bi-level plain token GAE.
    Source: Wang et al., VAGEN, 2025, arXiv 2510.16907.
    """
    mask = jnp.asarray(mask).astype(bool)
    value = fill(value, mask)
    ends = turn_ends(mask, turn)
    run = jnp.cumsum(ends) - ends
    size = mask.shape[0]
    earned = jax.ops.segment_sum(place_reward(reward, mask), run, size)[run]
    at_end, target = gae(fill(earned, ends), value, ends, discount=discount, lambda_=lambda_, bootstrap=bootstrap)
    if not bilevel:
        adv = fill(jax.ops.segment_sum(at_end, run, size)[run], mask)
        return adv, jax.lax.stop_gradient(jnp.where(ends, target, value))
    within = jnp.where(ends, 0.0, token_discount)
    return gae(target, value, mask, discount=within, lambda_=lambda_ if token_lambda is None else token_lambda)


def vtrace(
    reward: Array,
    value: Array,
    logp: Array,
    logp_behaviour: Array,
    mask: Array,
    *,
    discount: Array | float,
    lambda_: Array | float = 1.0,
    rho_clip: Array | float = 1.0,
    pg_rho_clip: Array | float = 1.0,
    bootstrap: Array | float = 0.0,
) -> tuple[Array, Array]:
    """V-trace over written tokens, with ``rho = exp(logp - logp_behaviour)``::

      delta_k = min(rho_clip, rho_k) * (r_k + discount * V_{k+1} - V_k)
      e_k     = delta_k + discount * lambda_ * min(1, rho_k) * e_{k+1}
      target  = V_k + e_k
      adv     = min(pg_rho_clip, rho_k) * (r_k + discount * q_{k+1} - V_k)
      q       = lambda_ * target + (1 - lambda_) * V,  and the bootstrap after the last token

    Args:
      reward, value, mask, discount, bootstrap: as in ``gae``.
      logp, logp_behaviour: ``[T]``; read at written tokens only; the log-ratio is clamped to 20 in magnitude.
      lambda_, rho_clip, pg_rho_clip: scalars.

    Returns:
      ``(adv, target)``, ``[T]`` each, 0 where nothing was written. No gradient flows through them.

    Source: Espeholt et al., IMPALA, 2018, arXiv 1802.01561; ``q`` with lambda as in rlax.
    """
    mask = jnp.asarray(mask).astype(bool)
    value = fill(value, mask)
    rho = jnp.exp(jnp.clip(fill(logp, mask) - fill(logp_behaviour, mask), -20.0, 20.0))
    reward = place_reward(reward, mask)
    delta = fill(jnp.minimum(rho_clip, rho) * (reward + discount * _next_value(value, mask, bootstrap) - value), mask)
    decay = jnp.where(mask, discount * lambda_ * jnp.minimum(1.0, rho), 1.0)
    target = fill(value + _backward(delta, decay, jnp.zeros((), delta.dtype)), mask)
    mixed = _next_value(lambda_ * target + (1.0 - lambda_) * value, mask, bootstrap)
    adv = fill(jnp.minimum(pg_rho_clip, rho) * (reward + discount * mixed - value), mask)
    return jax.lax.stop_gradient((adv, target))


def step_advantage(
    reward: Array, value: Array, mask: Array, *, discount: Array | float = 1.0, bootstrap: Array | float = 0.0
) -> Array:
    """VinePPO: ``A_k = r_k + discount * V_{k+1} - V_k`` over the steps (turns) that count, ``[K]``.

    ``value`` ``[K]`` are Monte-Carlo values at step boundaries (``monte_carlo_values``), ``reward`` ``[K]`` what each
    step earned, ``mask`` ``bool[K]`` the steps that were played. Give every token of a step its advantage with
    ``spread_turns``. Source: Kazemnejad et al., 2024, arXiv 2410.01679 (K = 9 rollouts, discount 1).
    """
    return gae(reward, value, mask, discount=discount, lambda_=0.0, bootstrap=bootstrap)[0]


def monte_carlo_values(ret: Array, step: Array, num_steps: int, *, bootstrap: Array | float = 0.0) -> Array:
    """Mean return of the rollouts branched at each step: ``[M], int32[M] -> [num_steps]``.

    A step nothing was branched from takes the value of the next step that has one (``bootstrap`` after the last), as
    VinePPO's code fills it; ids outside ``[0, num_steps)`` are ignored.
    """
    inside = (step >= 0) & (step < num_steps)
    where = jnp.where(inside, step, 0)
    total = jax.ops.segment_sum(fill(ret, inside), where, num_steps)
    count = jax.ops.segment_sum(inside.astype(jnp.float32), where, num_steps)
    value, known = total / jnp.maximum(count, 1.0), count > 0
    index = jax.lax.cummin(jnp.where(known, jnp.arange(num_steps), num_steps), reverse=True)
    padded = jnp.concatenate([value, jnp.reshape(jnp.asarray(bootstrap, value.dtype), (1,))])
    return jax.lax.stop_gradient(padded[index])


def spread_turns(x: Array, turn: Array, mask: Array) -> Array:
    """Gives every written token its turn's number: ``[K], int32[T], bool[T] -> [T]``; 0 where nothing was written.

    Turn ids outside ``[0, K)`` give 0.
    """
    inside = jnp.asarray(mask).astype(bool) & (turn >= 0) & (turn < x.shape[0])
    return fill(as_float(x)[jnp.where(inside, turn, 0)], inside)
