"""What an episode is paid besides its environment's reward: parts that add to ``traj.reward``.

A reward stands on the last written token of the turn that earned it, so estimators of any kind see it. Sources stand
with the presets that use a part (``algorithms.describe``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax import advantages, credit, episodes, selection, stages, statistics
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.checks import check_choice
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics, PyTree


def add_turn_rewards(batch: Batch, reward: Array, tools: Tools) -> Batch:
    """Adds ``reward`` ``[N, K]`` to the last written token of each turn; a turn without one earns nothing."""
    traj = batch.traj
    ends = jax.vmap(advantages.turn_ends)(traj.mask, traj.turn)
    rows = stages.episode_rows(reward, tools)
    more = jax.vmap(advantages.spread_turns)(rows, traj.turn, ends)
    return batch._replace(traj=traj._replace(reward=traj.reward + more))


def add_episode_reward(batch: Batch, reward: Array, tools: Tools) -> Batch:
    """Adds ``reward`` ``[N]`` to the last written token of each episode."""
    played = credit.played_turns(batch, tools)
    turns = jnp.arange(tools.max_turns)
    last = turns == jnp.max(jnp.where(played, turns, -1), axis=1)[:, None]
    return add_turn_rewards(batch, jnp.where(last, reward[:, None], 0.0), tools)


def soft_overlong() -> Part:
    """Adds DAPO's soft punishment of long episodes: from ``overlong_buffer`` tokens below ``max_tokens``, down to
    ``-overlong_coef``.

    Lengths count all tokens of a row, observations too: they fill the same context.
    """

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        length = jnp.max(batch.traj.length.reshape(-1, tools.segments), axis=1)
        extra = selection.soft_overlong(length, max_length=tools.max_tokens, buffer=hyper["overlong_buffer"])
        extra = hyper["overlong_coef"] * extra
        return add_episode_reward(batch, extra, tools), {"overlong": metrics_lib.masked(extra, length > 0)}

    return Part("soft_overlong", credit.pure(function), hyper={"overlong_buffer": 16.0, "overlong_coef": 1.0})


def malformed_penalty() -> Part:
    """Takes ``malformed_coef`` from every turn whose action the environment could not read (GiGPO, StarPO)."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        bad = credit.turn_steps(batch, tools, "malformed").astype(jnp.float32)
        return add_turn_rewards(batch, -hyper["malformed_coef"] * bad, tools), {}

    needs = frozenset({"parts:malformed"})
    return Part("malformed_penalty", credit.pure(function), hyper={"malformed_coef": 0.1}, needs=needs)


def step_reward(*, key_step: str = "tool_calls", validity: str = "answered") -> Part:
    """Step-GRPO's dense reward: the environment's, plus ``step_alpha`` times the share of turns with a key step, plus
    1 for a valid form.

    ``key_step`` and ``validity`` name parts of the environment. The paper matches key steps against the reference
    solution's; here an environment says which turns hold one.
    """

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        turns = jnp.sum(credit.played_turns(batch, tools), axis=1, dtype=jnp.float32)
        # The last turn answers: it cannot be a step towards the answer.
        share = jnp.clip(episodes.total(batch.traj, key_step, tools.segments) / jnp.maximum(turns - 1.0, 1.0), 0.0, 1.0)
        extra = hyper["step_alpha"] * share + jnp.clip(episodes.total(batch.traj, validity, tools.segments), 0.0, 1.0)
        return add_episode_reward(batch, extra, tools), {"dense_reward": metrics_lib.masked(extra, turns > 0)}

    needs = frozenset({f"parts:{key_step}", f"parts:{validity}"})
    return Part("step_reward", credit.pure(function), hyper={"step_alpha": 0.1}, needs=needs)


def posterior_reward(*, form: str = "answered", quality: str = "tool_calls") -> Part:
    """Posterior-GRPO: ``R_f + R_o + R_o R_t``: the process counts only where the outcome is right.

    ``R_o`` is the environment's return; ``form`` and ``quality`` name parts of it, each clipped to [0, 1].
    """

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, _, played = stages.episodes(batch, tools)
        ret = episodes.returns(batch.traj, tools.segments)
        part = lambda name: jnp.clip(episodes.total(batch.traj, name, tools.segments), 0.0, 1.0)  # noqa: E731
        extra = part(form) + ret * part(quality)
        return add_episode_reward(batch, extra, tools), {"dense_reward": metrics_lib.masked(extra, played)}

    return Part("posterior_reward", credit.pure(function), needs=frozenset({f"parts:{form}", f"parts:{quality}"}))


def kl_penalty(*, kl_estimator: str = "k1") -> Part:
    """``r_t <- r_t - kl_coef k(pi_old, pi_ref)_t`` on every token that the policy wrote itself."""
    check_choice("kl_estimator", kl_estimator, ESTIMATORS)
    needs = frozenset({"reference", "scores"})
    return Part("kl_penalty", stages.kl_in_reward(kl_estimator), hyper={"kl_coef": 0.01}, needs=needs)


def running_scale() -> Part:
    """Divides the environment's reward by the running deviation of its returns, kept over all steps so far.

    ``r <- r / (std + 1e-8)``, the deviation (ddof 1) of undiscounted returns of episodes; those of the step are taken
    in first, so that the first step is scaled too. While all returns were equal, up to rounding, nothing is divided.
    ``compose`` puts it before every other reward and penalty, whose coefficients are then in units of the deviation. A
    return that is not finite enters no statistic.

    Sources: Engstrom et al., Implementation Matters in Deep Policy Gradients, 2020, arXiv 2005.12729 (of discounted
    sums); on returns of whole episodes, as TRL's PPO scaled scores.
    """

    def init(key: Array, shape: Shape) -> PyTree:
        del key, shape
        return statistics.running_init()

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del hyper, key
        ret, _, played = stages.episodes(batch, tools)
        memory = statistics.running_update(memory, ret, played & jnp.isfinite(ret))
        reward = statistics.running_scale(memory, batch.traj.reward, ddof=1)
        return memory, batch._replace(traj=batch.traj._replace(reward=reward)), {}

    return Part("running_scale", stage, init=init)
