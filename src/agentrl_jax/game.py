"""What is static or constant during a rollout, and where its episodes begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from agentrl_jax import branching, stream
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment, canonical, canonical_params
from agentrl_jax.policy import Policy
from agentrl_jax.types import Array, Prefix, PyTree, Start, TimeStep

STEPS = {"reward": "float32", "anchor": "uint32", "cut": "bool", "played": "bool", "thinking": "int32"}
"""What ``Trajectory.steps`` holds beside the environment's info."""

TASK_SEED = 20_240_501
"""Root of the task keys: a task id names the same task in every step, run and program."""

# What a rollout's key is folded with. Splitting it in each of the functions that read it would use it more than once.
_TASKS, _PLAY = 0, 1


class Sizes(NamedTuple):
    """Static sizes of a rollout; ``chunk``, ``feed_rows``, ``env_rows`` and ``max_wait`` change time alone.

    Attributes:
      episodes, slots, max_tokens, group_size, segments: as in ``rollout``.
      chunk: tokens fed to a row at once.
      feed_rows: rows fed at once.
      env_rows: environments stepped at once.
      max_wait: iterations a closed action may wait while other rows decode.
    """

    episodes: int
    slots: int
    max_tokens: int
    group_size: int = 1
    segments: int = 1
    chunk: int = 32
    feed_rows: int = 16
    env_rows: int = 16
    max_wait: int = 16


class Game(NamedTuple):
    """Everything static or constant during a rollout."""

    policy: Policy | None
    codec: Codec
    env: Environment
    sizes: Sizes
    params: PyTree
    env_params: PyTree
    per_episode_params: bool
    task: Array
    group: Array
    temperature: Array
    teacher_turns: Array | None
    token_keys: Array
    env_keys: Array
    first_state: PyTree
    first_step: TimeStep
    order: Array
    active_count: Array
    filters: dict[str, Array]
    record: Callable[[PyTree], PyTree] | None
    prefix: Prefix | None

    @property
    def budget(self) -> int:
        """Tokens of an action, its end marker included."""
        return self.codec.max_tokens(self.env.spec.max_action) + 1


def check_room(codec: Codec, max_tokens: int) -> None:
    """Refuses rows that hold no action: start, two openings, a byte and the end marker must fit.

    Raises:
      ValueError: ``max_tokens`` is smaller.
    """
    least = codec.max_tokens(1) + 4
    if max_tokens < least:
        raise ValueError(
            f"max_tokens must be at least {least}, an empty prompt and one byte of action, got {max_tokens}"
        )


def check(policy: Policy | None, codec: Codec, env: Environment, sizes: Sizes, start: Start) -> None:
    """Refuses what ``rollout`` cannot play, before anything is compiled.

    Raises:
      ValueError: sizes that do not fit together, a policy or expert that is missing, a field of ``start`` of another
        size.
    """
    for name in ("episodes", "slots", "max_tokens", "group_size", "segments", "chunk", "feed_rows", "env_rows"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(sizes, name)}")
    if sizes.max_wait < 0:
        raise ValueError(f"max_wait must not be negative, got {sizes.max_wait}")
    check_room(codec, sizes.max_tokens)
    if sizes.episodes % sizes.group_size:
        raise ValueError(f"episodes ({sizes.episodes}) must be a multiple of group_size ({sizes.group_size})")
    if sizes.slots > sizes.episodes:
        raise ValueError(f"slots ({sizes.slots}) must be at most episodes ({sizes.episodes})")
    if env.spec.roles != 1:
        raise ValueError(f"{env.name} has {env.spec.roles} roles; the rollout plays one seat")
    if start.teacher_turns is not None and env.expert is None:
        raise ValueError(f"teacher_turns needs an expert, and {env.name} has none")
    if policy is None and start.teacher_turns is None:
        raise ValueError("policy is None: start.teacher_turns must be given, since the expert writes every turn")
    taken = sorted(set(dict(env.spec.info)) & set(STEPS))
    if taken:
        raise ValueError(f"{env.name}: EnvSpec.info must not use the names {taken}, which the rollout keeps itself")
    for name, value in start._asdict().items():
        if name not in ("params", "prefix") and value is not None and jnp.shape(value) != (sizes.episodes,):
            raise ValueError(f"start.{name} must have shape ({sizes.episodes},), got {jnp.shape(value)}")
    if start.prefix is not None:
        if sizes.segments != 1:
            raise ValueError(f"start.prefix continues rows of one context: segments must be 1, got {sizes.segments}")
        branching.check_prefix(start.prefix, env, (*dict(env.spec.info), *STEPS), sizes.episodes, sizes.max_tokens)


def check_vocabulary(policy: Policy, codec: Codec, params: PyTree) -> None:
    """Refuses a policy whose logits are not those of the codec's ids; ``params`` may be abstract, nothing is computed.

    Raises:
      ValueError: the policy has another number of logits than the codec has ids.
    """
    out = jax.eval_shape(policy.forward, params, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    size = jax.eval_shape(policy.logits, params, out.hidden).shape[-1]
    if size != codec.vocab_size:
        raise ValueError(f"the policy has {size} logits, and the codec {codec.name!r} has {codec.vocab_size} ids")


def check_numbers(temperature: Array | float, top_k: Array | int | None, top_p: Array | float | None) -> None:
    """Ranges of the numbers that are concrete; a traced one cannot be looked at.

    Raises:
      ValueError: a number out of range.
    """
    _check_temperature("temperature", temperature)
    k, p = _concrete(top_k), _concrete(top_p)
    if k is not None and not np.all(k >= 1):
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if p is not None and not np.all((p > 0) & (p <= 1)):
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def check_start(start: Start, groups: int | None) -> None:
    """Ranges of a start's values, where they are concrete; ids of groups are below ``groups``, where it is given.

    Raises:
      ValueError: a value out of range.
    """
    _check_temperature("start.temperature", start.temperature)
    group = _concrete(start.group)
    if group is None:
        return
    bad = group[(group < 0) | (group >= (np.inf if groups is None else groups))]
    if bad.size:
        allowed = "must not be negative" if groups is None else f"must be in [0, {groups})"
        raise ValueError(f"start.group {allowed}, got {bad[0]}")


def _check_temperature(name: str, value: Array | float | None) -> None:
    x = _concrete(value)
    if x is not None and not np.all(x >= 0):
        raise ValueError(f"{name} must not be negative, got {x[~(x >= 0)][0]}")


def _concrete(x: Any) -> np.ndarray | None:
    """``x`` as a NumPy array; None where it is absent, traced, or partly on other hosts."""
    if x is None or isinstance(x, Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def assign_tasks(key: Array, start: Start, episode_ids: Array, group_size: int) -> tuple[Array, Array]:
    """``(task, group)`` of every episode, ``int32[N]`` each: as ``start`` says, else equal groups that each draw a
    task.

    A drawn task follows from the rollout's ``key`` and the group alone (of ``episode_ids``, where groups are not
    given).
    """
    group = start.group
    if group is None:
        group = episode_ids // group_size
    if start.task is not None:
        return start.task.astype(jnp.int32), group.astype(jnp.int32)
    task_key = jax.random.fold_in(key, _TASKS)
    draw = jax.vmap(lambda g: jax.random.bits(jax.random.fold_in(task_key, g), dtype=jnp.uint32) >> 1)
    return draw(group).astype(jnp.int32), group.astype(jnp.int32)


def prepare(
    policy: Policy | None,
    codec: Codec,
    env: Environment,
    params: PyTree,
    key: Array,
    sizes: Sizes,
    start: Start,
    env_params: PyTree | None,
    temperature: Array | float,
    episode_ids: Array | None,
    record: Callable[[PyTree], PyTree] | None,
) -> Game:
    """Fills in ``start`` and resets every episode; group mates share a reset when their parameters do."""
    n, per_episode = sizes.episodes, start.params is not None
    ids = jnp.arange(n, dtype=jnp.int32) if episode_ids is None else jnp.asarray(episode_ids, jnp.int32)
    play_key = jax.random.fold_in(key, _PLAY)
    # With ids of a larger batch neighbours need not be mates.
    unique = episode_ids is None and start.task is None and start.group is None and not per_episode
    task, group = assign_tasks(key, start, ids, sizes.group_size)
    given = start.params if per_episode else env_params
    env_params = canonical_params(env.params if given is None else given, env.params)

    def reset(task, params):
        state, ts = env.reset(jax.random.fold_in(jax.random.key(TASK_SEED), task), params)
        return state, canonical(ts, env.spec)

    axes = (0, 0 if per_episode else None)
    distinct = task[:: sizes.group_size] if unique else task
    first = jax.vmap(reset, axes)(distinct, env_params)
    if unique:
        first = jax.tree.map(lambda x: jnp.repeat(x, sizes.group_size, axis=0), first)
    fold = jax.vmap(lambda e, d: jax.random.fold_in(jax.random.fold_in(play_key, e), d), (0, None))
    active = jnp.ones(n, bool) if start.active is None else start.active.astype(bool)
    prefix = start.prefix
    if prefix is not None:
        if record is not None:
            branching.check_record(prefix, jax.eval_shape(jax.vmap(record), first[0]), env.spec.max_turns)
        budget = codec.max_tokens(env.spec.max_action) + 1
        prefix, active = branching.settle(prefix, active, codec.pad, budget, env.spec.max_turns)
    given = jnp.asarray(temperature, jnp.float32) if start.temperature is None else start.temperature
    return Game(
        policy=policy,
        codec=codec,
        env=env,
        sizes=sizes,
        params=params,
        env_params=env_params,
        per_episode_params=per_episode,
        task=task,
        group=group,
        temperature=jnp.broadcast_to(given.astype(jnp.float32), (n,)),
        teacher_turns=None if start.teacher_turns is None else start.teacher_turns.astype(jnp.int32),
        token_keys=fold(ids, 0),
        env_keys=fold(ids, 1),
        first_state=first[0],
        first_step=first[1],
        order=jnp.argsort(~active, stable=True).astype(jnp.int32),
        active_count=jnp.sum(active, dtype=jnp.int32),
        filters={},
        record=record,
        prefix=prefix,
    )


def env_params_of(game: Game, episode: Array) -> tuple[PyTree, int | None]:
    """Parameters of the given episodes' environments, and the axis along which they differ."""
    if game.per_episode_params:
        return stream.gather(game.env_params, episode), 0
    return game.env_params, None
