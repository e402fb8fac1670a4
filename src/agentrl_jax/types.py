"""The records every other module passes around: text, environment steps, trajectories, batches.

Shapes: ``T`` tokens of a row, ``B`` rows, ``N`` episodes, ``G`` group size, ``K`` turns, ``C`` bytes of capacity.
Arrays are batch-major. Every record is a ``NamedTuple`` and therefore a JAX pytree.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Metrics: TypeAlias = dict[str, tuple[Array, Array]]
"""``{name: (total, count)}``: sums and counts add over micro-batches and devices, and are divided once, at the end."""


class Text(NamedTuple):
    """A byte string of static capacity.

    Attributes:
      data: ``uint8[C]``, zero at and beyond ``length``.
      length: ``int32[]`` in ``[0, C]``.
    """

    data: Array
    length: Array


class TimeStep(NamedTuple):
    """What ``reset`` and ``step`` return, unbatched; build it by keyword.

    Attributes:
      observation: ``Text`` for the seat that acts next, and for it alone.
      reward: ``float32[]`` (``[R]`` when the environment has ``R > 1`` roles).
      terminated: ``bool[]``, the task is over: no bootstrap.
      truncated: ``bool[]``, a limit cut it: the learner bootstraps from the final observation.
      restart: ``bool[]``, the context restarts: the observation opens a new row of the same episode.
      role: ``int32[]``, the seat that acts next.
      inputs: images and the like, or None.
      info: named scalars, the names and dtypes of ``EnvSpec.info`` from ``reset`` and ``step`` alike.
    """

    observation: Text
    reward: Array | float = 0.0
    terminated: Array | bool = False
    truncated: Array | bool = False
    restart: Array | bool = False
    role: Array | int = 0
    inputs: PyTree | None = None
    info: dict[str, Array] | None = None


class Prefix(NamedTuple):
    """What ``N`` episodes have behind them when they are continued; ``branching.branch`` makes it of a trajectory.

    Its tokens end inside an action, of which nothing need be written yet. An episode whose ``length`` is 0 begins at
    its reset as usual.

    Attributes:
      tokens, mask, expert, logp, reward, turn: ``[N, T]``, as in ``Trajectory``; read below ``length`` alone.
      length: ``int32[N]``, tokens that are kept, below ``T``.
      written: ``int32[N]``, of these written by the agent: the keys of its tokens go on from there.
      turns: ``int32[N]``, actions closed, which is the turn of the open one.
      began: ``int32[N]``, where the open action begins, at most ``length``.
      steps: ``{name: [N, K]}`` of the turns closed, and the open one's ``anchor``.
      record: ``[N, K + 1, ...]`` up to the open action, or None where the rollout keeps no record.
      env: environment state before the open action, leaves ``[N, ...]``.
      parent, branch: ``int32[N]``, written on the rows of the rollout.
    """

    tokens: Array
    mask: Array
    expert: Array
    logp: Array
    reward: Array
    turn: Array
    length: Array
    written: Array
    turns: Array
    began: Array
    steps: dict[str, Array]
    record: PyTree
    env: PyTree
    parent: Array
    branch: Array


class Start(NamedTuple):
    """Where ``N`` episodes begin; every field may be None for its default.

    Attributes:
      task: ``int32[N]``, identity of the task across steps: group mates share it, and so their reset key.
      group: ``int32[N]``, dense in ``[0, num_groups)``; sizes may differ.
      active: ``bool[N]``; an inactive episode is not played and its row has length 0.
      params: environment parameters with a leading ``[N]``, or None for the same everywhere.
      temperature: ``float32[N]``; 0 is greedy.
      teacher_turns: ``int32[N]``, leading turns written by ``env.expert`` instead of the policy.
      prefix: what was played before: episodes continue from the middle of a trajectory.
    """

    task: Array | None = None
    group: Array | None = None
    active: Array | None = None
    params: PyTree | None = None
    temperature: Array | None = None
    teacher_turns: Array | None = None
    prefix: Prefix | None = None


class Trajectory(NamedTuple):
    """``B`` rows of the token stream; row ``(episode * roles + role) * segments + segment``.

    Attributes:
      tokens: ``int32[B, T]``; padding at and beyond ``length``.
      mask: ``bool[B, T]``, written by the agent (sampled, or by the expert in its place); never prompt,
        observation or padding.
      expert: ``bool[B, T]``, written by the expert: ``logp`` is 0 there.
      logp: ``float32[B, T]``, behaviour log-probability of ``tokens[t]`` given ``tokens[:t]``; 0 where
        nothing was sampled.
      reward: ``float32[B, T]``, on the last written token of the action that earned it.
      turn: ``int32[B, T]``, turn index within the episode, -1 on padding. A turn is an observation and the
        action that answers it.
      length: ``int32[B]``; 0 for a row that was not played.
      terminated, truncated: ``bool[B]``, set on the last row of an episode alone.
      task, group, episode, role, segment, version: ``int32[B]``.
      parent, branch: ``int32[B]``, the row branched from (of the trajectory that was given to ``branching.branch``)
        and the first own token; -1 without.
      temperature: ``float32[B]``, what the row was sampled at (0: greedy); scoring uses the same.
      steps: ``{name: [B, K]}`` per turn: ``TimeStep.info``, ``reward``, ``anchor``, ``cut``, ``played`` and
        ``thinking`` (bytes of the action above its last line that is not blank).
      record: ``record(state)`` before action ``k`` and after the last, ``[B, K + 1, ...]``, or None.
      support: tokens allowed when sampling, or None: all of the codec's.
    """

    tokens: Array
    mask: Array
    expert: Array
    logp: Array
    reward: Array
    turn: Array
    length: Array
    terminated: Array
    truncated: Array
    task: Array
    group: Array
    episode: Array
    role: Array
    segment: Array
    version: Array
    parent: Array
    branch: Array
    temperature: Array
    steps: dict[str, Array]
    record: PyTree | None = None
    support: Array | None = None


class Batch(NamedTuple):
    """What a loss reads. The leading axis counts units (rows, or pairs of rows); the update permutes and splits it.

    Attributes:
      traj: the rows, ``[U, T]`` (or ``[U, 2, T]`` for pairs: chosen, then rejected).
      mask: ``bool[..., T]``, enters the loss. Clearing it drops a token from numerator and denominator.
      weight: ``float32[..., T]``, aggregation weights with their denominators inside.
      adv, target: ``float32[..., T]``, advantage and value target.
      logp_old: ``float32[..., T]``, log-probability at the start of the update.
      value: ``float32[..., T]``, value before ``tokens[t]`` is written, at the start of the update.
      bootstrap: ``float32[...]``, value after the last token.
      extra: anything else by name: ``logp_ref``, ``desirable``, importance weights.
    """

    traj: Trajectory
    mask: Array
    weight: Array
    adv: Array
    target: Array
    logp_old: Array
    value: Array
    bootstrap: Array
    extra: dict[str, Array]


class Score(NamedTuple):
    """A model's view of written tokens, aligned to ``traj.tokens``: ``logp``, ``entropy``, ``value``, ``[..., T]``,
    and ``bootstrap``, ``[...]``, the value after the last token."""

    logp: Array
    entropy: Array
    value: Array
    bootstrap: Array
