"""Losses on preferences between responses, of log-probabilities of whole sequences.

Inputs are ``[P]``, one number a pair (``w`` the chosen, ``l`` the rejected response): sums over the tokens the agent
wrote, or means where a function says so (``sequence_logp`` makes both; prompt and observation tokens stay out).
Results are unreduced ``[P]``; the reference never carries gradient. Everything goes through ``log_sigmoid`` or
``softplus``, so losses and gradients are finite at any margin.
"""

from __future__ import annotations

import jax

from agentrl_jax.masked import as_float, masked_mean, masked_sum
from agentrl_jax.types import Array


def sequence_logp(logp: Array, mask: Array, *, average: bool = False) -> Array:
    """Log-probability of what the agent wrote: ``[..., T] -> [...]``, summed, or averaged over its tokens.

    A sequence without written tokens gives 0.
    """
    return masked_mean(logp, mask, -1) if average else masked_sum(logp, mask, -1)


def margin(logp_w: Array, logp_l: Array, ref_w: Array, ref_l: Array) -> Array:
    """``h = (logp_w - ref_w) - (logp_l - ref_l)``, ``[P]``; no gradient flows into the reference."""
    ref_w, ref_l = jax.lax.stop_gradient((as_float(ref_w), as_float(ref_l)))
    return (as_float(logp_w) - ref_w) - (as_float(logp_l) - ref_l)


def dpo(
    logp_w: Array,
    logp_l: Array,
    ref_w: Array,
    ref_l: Array,
    *,
    beta: Array | float = 0.1,
    label_smoothing: Array | float = 0.0,
) -> Array:
    """``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, ``h`` the margin, ``e`` the label smoothing.

    ``[P]`` sums (means with a larger ``beta`` are the length-normalised form). ``e > 0`` is conservative DPO (Mitchell,
    2023). ``h = 0`` gives log 2. Over several turns the environment's own probabilities cancel in ``h`` when
    observation tokens are masked; the partition functions of later states do not: see ``dmpo``.

    Source: Rafailov et al., Direct Preference Optimization, 2023, arXiv 2305.18290.
    """
    z = beta * margin(logp_w, logp_l, ref_w, ref_l)
    return -(1.0 - label_smoothing) * jax.nn.log_sigmoid(z) - label_smoothing * jax.nn.log_sigmoid(-z)
