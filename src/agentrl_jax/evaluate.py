"""Evaluation: every problem once greedily and k times sampled, in one rollout, inside the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment, played_member
from agentrl_jax.policy import Policy
from agentrl_jax.rollout import rollout
from agentrl_jax.types import Array, PyTree, Start, Trajectory


class Evaluation(NamedTuple):
    """Outcomes of ``P`` problems with ``1 + k`` tries each: column 0 is greedy, the others are sampled.

    Attributes:
      success: ``float32[P, 1 + k]``, ``info["success"]`` summed over turns (the return, where there is no such
        name), at most 1.
      reward: ``float32[P, 1 + k]``, return.
      turns, length, written: ``float32[P, 1 + k]``, actions, tokens, and tokens written by the agent.
      info: every ``TimeStep.info`` name summed over turns, ``float32[P, 1 + k]``.
      trajectory: the rows, problem-major.
      member: ``int32[P, 1 + k]``, the member of a mixture that was played (-1: no action was); None elsewhere.
    """

    success: Array
    reward: Array
    turns: Array
    length: Array
    written: Array
    info: dict[str, Array]
    trajectory: Trajectory
    member: Array | None = None


def make_evaluate(
    policy: Policy,
    codec: Codec,
    env: Environment,
    *,
    problems: int,
    samples: int,
    max_tokens: int,
    slots: int | None = None,
    segments: int = 1,
    chunk: int | None = None,
    feed_rows: int | None = None,
    env_rows: int | None = None,
) -> Callable[..., Evaluation]:
    """``evaluate(params, key, env_params=None, temperature=1.) -> Evaluation``; pure, to be jitted with training or
    alone.

    Raises:
      ValueError: fewer than one problem, or a negative number of samples.
    """
    if problems < 1 or samples < 0:
        raise ValueError(f"problems must be at least 1 and samples at least 0, got {problems} and {samples}")
    tries = 1 + samples
    episodes = problems * tries

    def evaluate(
        params: PyTree, key: Array, env_params: PyTree | None = None, temperature: Array | float = 1.0
    ) -> Evaluation:
        greedy = jnp.arange(episodes) % tries == 0
        traj = rollout(
            policy, codec, env, params, key, episodes=episodes, slots=min(slots or episodes, episodes),
            max_tokens=max_tokens, group_size=tries, env_params=env_params, segments=segments,
            start=Start(temperature=jnp.where(greedy, 0.0, temperature)), chunk=chunk, feed_rows=feed_rows,
            env_rows=env_rows,
        )  # fmt: skip
        return summarize(traj, problems, tries, mixed=bool(env.spec.members))

    return evaluate


def summarize(traj: Trajectory, problems: int, tries: int, *, mixed: bool = False) -> Evaluation:
    """Per-episode outcomes of a rollout of ``problems * tries`` episodes; ``mixed``: of a mixture of environments."""
    total = lambda x: jnp.sum(x.reshape(problems * tries, -1).astype(jnp.float32), axis=1).reshape(problems, tries)  # noqa: E731
    skip = ("played", "anchor", "cut", "reward", *(("env",) if mixed else ()))
    info = {k: total(v) for k, v in traj.steps.items() if k not in skip}
    member = played_member(traj.steps, problems * tries).reshape(problems, tries) if mixed else None
    reward = total(traj.reward)
    success = jnp.clip(info.get("success", reward), 0.0, 1.0)
    return Evaluation(
        success, reward, total(traj.steps["played"]), total(traj.length), total(traj.mask), info, traj, member
    )  # fmt: skip
