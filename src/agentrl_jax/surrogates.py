"""Policy losses by two choices, a ratio and a clip: what they are of, and what they need.

``SURROGATES[ratio, clip]`` is the heart of an objective: a per-token loss, its numbers, and whether it still
holds once the policy has moved on. A loss of whole sequences is given to their tokens; weights that average over a
sequence's tokens then give each sequence the same say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import imitation, losses
from agentrl_jax.importance import log_ratio
from agentrl_jax.masked import fill, masked_sum
from agentrl_jax.types import Array, Batch, Score

Surrogate = Callable[[Score, Batch, dict[str, Array]], Array]


class Loss(NamedTuple):
    """A policy loss and what it takes.

    Attributes:
      surrogate: ``(Score, Batch, hyper) -> [..., T]``.
      rule: the formula, for people.
      hyper: the numbers it reads, and their defaults.
      single: it does not correct for a policy that has moved since the batch was scored.
      sequence: its ratio is one of whole sequences, which a row must hold.
      clips: ``eps_low`` and ``eps_high`` bound the ratio of a token.
    """

    surrogate: Surrogate
    rule: str
    hyper: dict[str, float] = {}  # noqa: RUF012 - never mutated: a NamedTuple default
    single: bool = False
    sequence: bool = False
    clips: bool = False


_CLIP = {"eps_low": 0.2, "eps_high": 0.2}


def _tokens(loss: Callable[..., Array], *names: str) -> Surrogate:
    """A loss ``(logp, logp_old, adv, mask=, ...)`` with keyword numbers ``names``."""

    def surrogate(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
        numbers = {name: hyper[name] for name in names}
        return loss(score.logp, batch.logp_old, batch.adv, mask=batch.mask, **numbers)

    return surrogate


def _sequences(loss: Callable[..., Array]) -> Surrogate:
    """A loss ``(logp, logp_old, adv, mask, eps_low, eps_high) -> [...]``, given to each token of its sequence."""

    def surrogate(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
        each = loss(
            score.logp, batch.logp_old, batch.adv, batch.mask, eps_low=hyper["eps_low"], eps_high=hyper["eps_high"]
        )
        return jnp.where(batch.mask, each[..., None], 0.0)

    return surrogate


def _policy_gradient(logp: Array, logp_old: Array, adv: Array, *, mask: Array) -> Array:
    del logp_old
    return losses.policy_gradient(logp, adv, mask=mask)


def _unclipped(logp: Array, logp_old: Array, adv: Array, *, mask: Array) -> Array:
    return -jax.lax.stop_gradient(fill(adv, mask)) * jnp.exp(log_ratio(logp, logp_old, mask))


def _product(
    logp: Array, logp_old: Array, adv: Array, mask: Array, *, eps_low: Array | float, eps_high: Array | float
) -> Array:
    """PPO's clip on the ratio of whole sequences, ``exp(sum_t(logp - logp_old))``, as TRL's RLOO: ``[..., T] ->
    [...]``."""
    total = lambda x: masked_sum(x, mask, -1)  # noqa: E731
    count = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    return losses.ppo_clip(total(logp), total(logp_old), total(adv) / count, eps_low=eps_low, eps_high=eps_high)


def _awr(logp: Array, logp_old: Array, adv: Array, *, mask: Array, awr_beta: Array, weight_max: Array) -> Array:
    del logp_old
    return imitation.awr(logp, adv, beta=awr_beta, weight_max=weight_max, mask=mask)


def _dft(logp: Array, logp_old: Array, adv: Array, *, mask: Array) -> Array:
    del logp_old
    return jax.lax.stop_gradient(fill(adv, mask)) * imitation.dft(logp, mask=mask)


def _dual(logp, logp_old, adv, *, mask, eps_low, eps_high, dual_clip):
    return losses.ppo_clip(logp, logp_old, adv, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip, mask=mask)


def _two_sided(logp, logp_old, adv, *, mask, eps_low, eps_high, ratio_max):
    return losses.ppo_clip(logp, logp_old, adv, eps_low=eps_low, eps_high=eps_high, ratio_max=ratio_max, mask=mask)


def _kl_cov(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    held = batch.extra["held"]
    return losses.kl_cov(score.logp, batch.logp_old, batch.adv, held, coef=hyper["cov_coef"], mask=batch.mask)


SURROGATES: dict[tuple[str, str], Loss] = {
    ("none", "none"): Loss(_tokens(_policy_gradient), "-A log pi", single=True),
    ("none", "exponential"): Loss(
        _tokens(_awr, "awr_beta", "weight_max"), "-min(exp(A / awr_beta), weight_max) log pi",
        {"awr_beta": 0.5, "weight_max": 20.0}, single=True,
    ),
    ("none", "probability"): Loss(_tokens(_dft), "-A sg(pi) log pi", single=True),
    ("token", "none"): Loss(_tokens(_unclipped), "-A r, r = pi / pi_old of a token"),
    ("token", "ppo"): Loss(
        _tokens(losses.ppo_clip, "eps_low", "eps_high"), "max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))", _CLIP,
        clips=True,
    ),
    ("token", "dual"): Loss(
        _tokens(_dual, "eps_low", "eps_high", "dual_clip"), "PPO's clip, and at most dual_clip |A| for A < 0",
        _CLIP | {"dual_clip": 3.0}, clips=True,
    ),
    ("token", "two-sided"): Loss(
        _tokens(_two_sided, "eps_low", "eps_high", "ratio_max"), "PPO's clip with r at most ratio_max",
        _CLIP | {"ratio_max": 4.0}, clips=True,
    ),
    ("token", "cispo"): Loss(
        _tokens(losses.cispo, "eps_low", "eps_high"), "-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi",
        {"eps_low": 1.0, "eps_high": 0.28},
    ),
    ("token", "sapo"): Loss(
        _tokens(losses.sapo, "tau_pos", "tau_neg"), "-A (4 / tau) sigmoid(tau (r - 1))",
        {"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    ("token", "asymmetric"): Loss(
        _tokens(losses.asymmetric_is, "eps_low", "eps_high"), "weight 1 / r for A > 0, r for A < 0, both at most 3",
        _CLIP,
    ),
    ("token", "kl-cov"): Loss(_kl_cov, "-A r + cov_coef |log r| on the held tokens", {"cov_coef": 1.0}),
    ("sequence", "ppo"): Loss(
        _sequences(losses.gspo), "PPO's clip on s = exp(mean_t log r_t)", {"eps_low": 3e-4, "eps_high": 4e-4},
        sequence=True,
    ),
    ("sequence-token", "ppo"): Loss(
        _tokens(losses.gspo_token, "eps_low", "eps_high"), "PPO's clip on sg(s) pi / sg(pi), s = exp(mean_t log r_t)",
        {"eps_low": 3e-4, "eps_high": 4e-4}, sequence=True,
    ),
    ("geometric", "ppo"): Loss(
        _sequences(losses.gmpo), "-A exp(mean_t of log r clipped to [-eps_low, eps_high], one-sided)",
        {"eps_low": 0.4, "eps_high": 0.4}, sequence=True,
    ),
    ("product", "ppo"): Loss(
        _sequences(_product), "PPO's clip on the product of a sequence's ratios", _CLIP, sequence=True
    ),
}  # fmt: skip
"""By (ratio, clip): what is divided by what, and what bounds it."""

RATIOS = tuple(dict.fromkeys(ratio for ratio, _ in SURROGATES))
CLIPS = tuple(dict.fromkeys(clip for _, clip in SURROGATES))


def surrogate(ratio: str, clip: str) -> Loss:
    """The policy loss of a ratio and a clip.

    Raises:
      ValueError: an unknown name, or two that do not go together, with those that do.
    """
    for name, value, known in (("ratio", ratio, RATIOS), ("clip", clip, CLIPS)):
        if value not in known:
            raise ValueError(f"Unknown {name} {value!r}. Known: {', '.join(known)}.")
    if (ratio, clip) not in SURROGATES:
        fitting = ", ".join(c for r, c in SURROGATES if r == ratio)
        why = "there is no ratio to clip" if ratio == "none" else f"clip {clip!r} is not defined on the {ratio} ratio"
        raise ValueError(f"ratio {ratio!r} with clip {clip!r}: {why}; it goes with: {fitting}")
    return SURROGATES[ratio, clip]


class Imitation(NamedTuple):
    """A term on text the policy did not sample, or on its correct episodes.

    Attributes:
      kind: "replace": the surrogate of expert tokens in the same average; "mix": a loss of its own, ``(1 - mu) RL +
        mu imitation``; "add": ``+ coef * imitation``.
      loss: ``(Score, Batch, hyper) -> [..., T]``.
      rule: the formula, for people.
      hyper: its numbers.
      expert: whether it is about the expert's tokens (else about correct episodes).
    """

    kind: str
    loss: Surrogate
    rule: str
    hyper: dict[str, float]
    expert: bool = True


def likelihood(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    """``-log pi`` per token: supervised learning."""
    del hyper
    return imitation.nll(score.logp, mask=batch.mask)


def _phi(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    del hyper
    return imitation.chord_phi(score.logp, mask=batch.mask)


def _luffy(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    return imitation.luffy(score.logp, batch.adv, gamma=hyper["luffy_gamma"], mask=batch.mask)


def _rl_plus(score: Score, batch: Batch, hyper: dict[str, Array]) -> Array:
    return imitation.rl_plus(score.logp, batch.logp_old, batch.adv, power=hyper["explore_power"], mask=batch.mask)


IMITATIONS: dict[str, Imitation] = {
    "luffy": Imitation(
        "replace", _luffy, "expert tokens: -A pi / (pi + luffy_gamma)", {"luffy_gamma": 0.1}
    ),
    "rl-plus": Imitation(
        "replace", _rl_plus, "expert tokens: -A sg((1 - pi)^explore_power) 2 pi / (pi_old + (1 + pi_old) / 2)",
        {"explore_power": 0.5},
    ),
    "chord": Imitation("mix", likelihood, "mu (-log pi) on expert tokens", {"mu": 0.1}),
    "chord-phi": Imitation("mix", _phi, "mu sg(pi (1 - pi)) (-log pi) on expert tokens", {"mu": 0.1}),
    "positive": Imitation(
        "add", likelihood, "nll_coef (-log pi) averaged over tokens of correct episodes", {"nll_coef": 0.1},
        expert=False,
    ),
}  # fmt: skip
"""By name: what is learned from other text than the policy's own rewarded samples."""
