"""What follows an update: resets of the reference policy, schedules and controllers of coefficients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import imitation, statistics
from agentrl_jax.algorithm import TrainState
from agentrl_jax.types import Array, Metrics, PyTree

Apply = Callable[[TrainState, Metrics, dict[str, Array]], TrainState]


class Finish(NamedTuple):
    """An ingredient of ``Algorithm.finish``: what it does, and the numbers and needs it brings."""

    apply: Apply
    hyper: dict[str, float]
    needs: frozenset[str] = frozenset()


def _set(state: TrainState, **numbers: Array) -> TrainState:
    own = {**state.hyper.algorithm, **{k: jnp.asarray(v, jnp.float32) for k, v in numbers.items()}}
    return state._replace(hyper=state.hyper._replace(algorithm=own))


def _where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _reset_reference(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
    """ProRL: the reference becomes the policy and the optimiser forgets, every ``reset_every`` steps, or when the
    divergence exceeds ``reset_kl``. ``reset_every=0``: never by the clock."""
    total, count = metrics["kl"]
    far = total > hyper["reset_kl"] * jnp.maximum(count, 1.0)
    every = hyper["reset_every"]
    due = (every > 0) & (jnp.mod(state.step.astype(jnp.float32) + 1.0, jnp.maximum(every, 1.0)) < 0.5)
    now = far | due
    reference = _where(now, state.params["policy"], state.params["reference"])
    fresh = jax.tree.map(jnp.zeros_like, state.opt_state)
    return state._replace(
        params={**state.params, "reference": reference}, opt_state=_where(now, fresh, state.opt_state)
    )


def _anneal_imitation(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
    """CHORD: the share of imitation in the next step, ``mu``, warms up and then falls along a cosine."""
    del metrics
    mu = imitation.chord_mu(
        state.step + 1, peak=hyper["mu_peak"], valley=hyper["mu_valley"], warmup=hyper["mu_warmup"],
        decay=hyper["mu_decay"],
    )  # fmt: skip
    return _set(state, mu=mu)


def _adapt_kl(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
    """Ziegler et al.: ``kl_coef`` up where the divergence is above ``kl_target``, down where it is below."""
    total, count = metrics["kl"] if "kl" in metrics else metrics["kl_reward"]
    _, episodes = metrics["reward"]
    coef = statistics.adaptive_kl(
        hyper["kl_coef"], total / jnp.maximum(count, 1.0), target=hyper["kl_target"], horizon=hyper["kl_horizon"],
        count=episodes,
    )  # fmt: skip
    return _set(state, kl_coef=jnp.where(count > 0, coef, hyper["kl_coef"]))


def _adapt_entropy(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
    """Skywork-OR1: the entropy bonus grows by ``entropy_step`` while entropy is below ``entropy_target``, and counts
    only then."""
    total, count = metrics["entropy"]
    kept, applied = statistics.adaptive_entropy(
        hyper["entropy_reserve"], total / jnp.maximum(count, 1.0), target=hyper["entropy_target"],
        step=hyper["entropy_step"],
    )  # fmt: skip
    seen = count > 0
    return _set(
        state, entropy_coef=jnp.where(seen, applied, hyper["entropy_coef"]),
        entropy_reserve=jnp.where(seen, kept, hyper["entropy_reserve"]),
    )  # fmt: skip


FINISH: dict[str, Finish] = {
    "reset_reference": Finish(_reset_reference, {"reset_every": 100.0, "reset_kl": 1.0}, frozenset({"reference"})),
    "anneal_imitation": Finish(
        _anneal_imitation, {"mu_peak": 0.9, "mu_valley": 0.05, "mu_warmup": 0.0, "mu_decay": 200.0}
    ),
    "adapt_kl": Finish(_adapt_kl, {"kl_target": 0.02, "kl_horizon": 1e4}, frozenset({"reference"})),
    "adapt_entropy": Finish(_adapt_entropy, {"entropy_target": 0.2, "entropy_step": 0.005, "entropy_reserve": 0.0}),
}
"""What ``compose(finish=...)`` knows."""
