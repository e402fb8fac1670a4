"""The rollout: N episodes flow through S slots of one ``while_loop``, environment, tools and sampling included.

An iteration steps environments whose action is closed, feeds what they answered, and decodes one token on every row
that can. The environment and feeding phases work on a few gathered rows, so they cost what is asked of them, and a
finished slot takes the next episode at once. The order in which rows are served changes time, never tokens:
randomness belongs to the episode and the number of tokens it has written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import control, sampling, stream, text
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment, canonical, canonical_params
from agentrl_jax.policy import Policy
from agentrl_jax.stream import DONE, IDLE, RUN, WAIT, Slots
from agentrl_jax.types import Array, PyTree, Start, Text, TimeStep, Trajectory

TASK_SEED = 20_240_501
"""Root of the task keys: a task id names the same task in every step, run and program."""


_STEPS = {"reward": "float32", "anchor": "uint32", "cut": "bool", "played": "bool", "thinking": "int32"}
"""What ``Trajectory.steps`` holds beside the environment's info."""


class RolloutStats(NamedTuple):
    """What the schedule did: ``iterations`` of the loop, ``decoded`` tokens sampled, ``steps`` of environments,
    ``fed`` tokens."""

    iterations: Array
    decoded: Array
    steps: Array
    fed: Array


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


class _Game(NamedTuple):
    """Everything static or constant during a rollout."""

    policy: Policy | None
    codec: Codec
    env: Environment
    sizes: Sizes
    params: PyTree
    env_params: PyTree
    per_episode_params: bool
    start: Start
    token_keys: Array
    env_keys: Array
    first_state: PyTree
    first_step: TimeStep
    order: Array
    active_count: Array
    filters: dict[str, Array]
    record: Callable[[PyTree], PyTree] | None
    teacher: bool

    @property
    def budget(self) -> int:
        """Tokens of an action, its end marker included."""
        return self.codec.max_tokens(self.env.spec.max_action) + 1


class _Carry(NamedTuple):
    slots: Slots
    cache: PyTree
    rows: Slots
    next: Array
    stats: RolloutStats


def rollout(
    policy: Policy | None,
    codec: Codec,
    env: Environment,
    params: PyTree,
    key: Array,
    *,
    episodes: int,
    slots: int,
    max_tokens: int,
    group_size: int = 1,
    env_params: PyTree | None = None,
    temperature: Array | float = 1.0,
    start: Start | None = None,
    segments: int = 1,
    record: Callable[[PyTree], PyTree] | None = None,
    version: Array | int = 0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    episode_ids: Array | None = None,
    chunk: int | None = None,
    feed_rows: int | None = None,
    env_rows: int | None = None,
    max_wait: int = 16,
) -> Trajectory:
    """Plays ``episodes`` episodes of ``env`` with ``policy`` and returns their token streams.

    Args:
      policy: a model as functions, or None: the expert writes every turn (``start.teacher_turns`` says so too).
      codec: joins the environment's bytes to the model's tokens.
      env: a static environment.
      params: the policy's parameters.
      key: typed key; consumed. Token keys are ``fold_in`` of episode id and tokens written so far.
      episodes: total number, a multiple of ``group_size``.
      slots: rows in play at once; at most ``episodes``.
      max_tokens: ``T``; an episode (a row of it, where contexts restart) that meets it is truncated.
      group_size: consecutive episodes that share the task, and so the reset key.
      env_params: traced difficulty; None: the environment's own.
      temperature: scalar; ``start.temperature`` goes before it. 0 is greedy.
      start: where episodes begin; None: fresh tasks in equal groups.
      segments: rows an episode may use where its context restarts.
      record: kept before every action and after the last, ``Trajectory.record``.
      version: policy step that samples, written on every row.
      top_k, top_p: filters for evaluation (training scores without them); None: absent.
      episode_ids: ``int32[episodes]``, when this call plays a part of a larger batch: keys, tasks and
        groups follow from them, not from the position in this call.
      chunk, feed_rows, env_rows, max_wait: the schedule; see ``Sizes``.

    Returns:
      ``Trajectory`` of ``B = episodes * segments`` rows.

    Raises:
      ValueError: sizes that do not fit together, a number out of range, a policy or expert that is missing.
    """
    traj, _ = rollout_with_stats(
        policy, codec, env, params, key, episodes=episodes, slots=slots, max_tokens=max_tokens, group_size=group_size,
        env_params=env_params, temperature=temperature, start=start, segments=segments, record=record, version=version,
        top_k=top_k, top_p=top_p, episode_ids=episode_ids, chunk=chunk, feed_rows=feed_rows, env_rows=env_rows,
        max_wait=max_wait,
    )  # fmt: skip
    return traj


def rollout_with_stats(
    policy: Policy | None,
    codec: Codec,
    env: Environment,
    params: PyTree,
    key: Array,
    *,
    episodes: int,
    slots: int,
    max_tokens: int,
    group_size: int = 1,
    env_params: PyTree | None = None,
    temperature: Array | float = 1.0,
    start: Start | None = None,
    segments: int = 1,
    record: Callable[[PyTree], PyTree] | None = None,
    version: Array | int = 0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    episode_ids: Array | None = None,
    chunk: int | None = None,
    feed_rows: int | None = None,
    env_rows: int | None = None,
    max_wait: int = 16,
) -> tuple[Trajectory, RolloutStats]:
    """``rollout`` and what its schedule did; the same arguments."""
    few = max(1, min(slots, 16, -(-slots // 8)))
    chunk, feed_rows, env_rows = (
        default if x is None else x for x, default in ((chunk, 32), (feed_rows, few), (env_rows, few))
    )
    sizes = Sizes(
        episodes, slots, max_tokens, group_size, segments, min(chunk, max_tokens), min(feed_rows, slots),
        min(env_rows, slots), max_wait,
    )  # fmt: skip
    start = Start() if start is None else start
    check(policy, env, sizes, start)
    _check_numbers(temperature, top_k, top_p)
    game = _prepare(policy, codec, env, params, key, sizes, start, env_params, temperature, episode_ids, record)
    filters = {"top_k": top_k, "top_p": top_p}
    game = game._replace(filters={k: jnp.asarray(v) for k, v in filters.items() if v is not None})
    carry = _first_carry(game)
    carry = jax.lax.while_loop(lambda c: control.any_(c.slots.phase != IDLE), lambda c: _iterate(game, c), carry)
    return _trajectory(game, carry.rows, version), carry.stats


def check(policy: Policy | None, env: Environment, sizes: Sizes, start: Start) -> None:
    """Refuses what ``rollout`` cannot play, before anything is compiled.

    Raises:
      ValueError: sizes that do not fit together, a policy or expert that is missing, a field of ``start`` of another
        size.
    """
    for name in ("episodes", "slots", "max_tokens", "group_size", "segments", "chunk", "feed_rows", "env_rows"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(sizes, name)}")
    if sizes.episodes % sizes.group_size:
        raise ValueError(f"episodes ({sizes.episodes}) must be a multiple of group_size ({sizes.group_size})")
    if sizes.slots > sizes.episodes:
        raise ValueError(f"slots ({sizes.slots}) must be at most episodes ({sizes.episodes})")
    if env.spec.roles != 1:
        raise ValueError(f"{env.name} has {env.spec.roles} roles; the rollout plays one seat")
    if start.prefix is not None:
        raise ValueError("start.prefix must be None: the rollout starts episodes at their reset")
    if start.teacher_turns is not None and env.expert is None:
        raise ValueError(f"teacher_turns needs an expert, and {env.name} has none")
    if policy is None and start.teacher_turns is None:
        raise ValueError("policy is None: start.teacher_turns must cover every turn")
    taken = sorted(set(dict(env.spec.info)) & set(_STEPS))
    if taken:
        raise ValueError(f"{env.name}: EnvSpec.info must not use the names {taken}, which the rollout keeps itself")
    for name, value in start._asdict().items():
        if name not in ("params", "prefix") and value is not None and jnp.shape(value) != (sizes.episodes,):
            raise ValueError(f"start.{name} must have shape ({sizes.episodes},), got {jnp.shape(value)}")


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
    task_key, _ = jax.random.split(key)
    draw = jax.vmap(lambda g: jax.random.bits(jax.random.fold_in(task_key, g), dtype=jnp.uint32) >> 1)
    return draw(group).astype(jnp.int32), group.astype(jnp.int32)


def _check_numbers(temperature: Array | float, top_k: Array | int | None, top_p: Array | float | None) -> None:
    """Ranges of the numbers that are concrete; a traced one cannot be looked at."""
    if isinstance(temperature, int | float) and not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if isinstance(top_k, int) and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def _prepare(policy, codec, env, params, key, sizes, start, env_params, temperature, episode_ids, record) -> _Game:
    """Fills in ``start`` and resets every episode; group mates share a reset when their parameters do."""
    n, per_episode = sizes.episodes, start.params is not None
    ids = jnp.arange(n, dtype=jnp.int32) if episode_ids is None else jnp.asarray(episode_ids, jnp.int32)
    _, play_key = jax.random.split(key)
    # With ids of a larger batch neighbours need not be mates.
    unique = episode_ids is None and start.task is None and start.group is None and not per_episode
    task, group = assign_tasks(key, start, ids, sizes.group_size)
    env_params = canonical_params(start.params if per_episode else env.params if env_params is None else env_params)

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
    start = Start(
        task=task, group=group, active=active, params=None,
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (n,))
        if start.temperature is None else start.temperature.astype(jnp.float32),
        teacher_turns=None if start.teacher_turns is None else start.teacher_turns.astype(jnp.int32),
    )  # fmt: skip
    return _Game(
        policy, codec, env, sizes, params, env_params, per_episode, start, fold(ids, 0), fold(ids, 1), *first,
        jnp.argsort(~active, stable=True).astype(jnp.int32), jnp.sum(active, dtype=jnp.int32), {}, record,
        start.teacher_turns is not None,
    )  # fmt: skip


def _env_params(game: _Game, episode: Array) -> tuple[PyTree, int | None]:
    if game.per_episode_params:
        return stream.gather(game.env_params, episode), 0
    return game.env_params, None


def _expert_turn(game: _Game, slots: Slots) -> Slots:
    """Lets the expert write the next action on rows whose turn is the teacher's; they wait for the environment at
    once."""
    if not game.teacher or game.env.expert is None or game.start.teacher_turns is None:
        return slots
    mine = slots.phase == RUN
    if game.policy is not None:
        mine &= slots.turn < game.start.teacher_turns[slots.episode]
    keys = jax.vmap(lambda k, t: jax.random.fold_in(k, 2 * t + 1))(game.env_keys[slots.episode], slots.turn)
    params, axis = _env_params(game, slots.episode)
    action = jax.vmap(game.env.expert, (0, 0, axis))(keys, slots.env, params)
    ids, count = stream.action_block(game.codec, action, game.budget)
    after = stream.append(slots, ids, jnp.where(mine, count, 0), written=True)
    whole = after.length - slots.length == count
    return after._replace(
        phase=jnp.where(mine, jnp.where(whole, WAIT, DONE), slots.phase), truncated=slots.truncated | (mine & ~whole)
    )


def _open_turn(game: _Game, slots: Slots, observation: Text, go: Array, first: Array, last: Array) -> Slots:
    """Appends an observation where ``go``: opens the row where ``first``, closes it (no action follows) where
    ``last``."""
    ids, count = stream.observation_block(game.codec, observation, first)
    after = stream.append(slots, ids, jnp.where(go, count - last, 0))
    after = after._replace(
        began=jnp.where(go, after.length, slots.began),
        cut=slots.cut & ~go,
        phase=jnp.where(go, jnp.where(last, DONE, RUN), slots.phase),
    )
    full = go & ~last & (after.length >= game.sizes.max_tokens)
    after = after._replace(phase=jnp.where(full, DONE, after.phase), truncated=after.truncated | full)
    return _expert_turn(game, after)


def _empty(game: _Game, batch: int) -> Slots:
    """Rows without an episode."""
    n, spec, sizes = batch, game.env.spec, game.sizes
    zero, off = jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
    grid = lambda dtype, fill=0: jnp.full((n, sizes.max_tokens), fill, dtype)  # noqa: E731
    names = dict(spec.info) | _STEPS
    env = jax.tree.map(lambda x: jnp.zeros((n, *x.shape[1:]), x.dtype), game.first_state)
    record = None
    if game.record is not None:
        kept = jax.eval_shape(jax.vmap(game.record), env)
        record = jax.tree.map(lambda x: jnp.zeros((n, spec.max_turns + 1, *x.shape[1:]), x.dtype), kept)
    return Slots(
        episode=zero, segment=zero, phase=zero + IDLE, length=zero, cached=zero, began=zero, turn=zero, written=zero,
        age=zero, cut=off, truncated=off, hidden=_hidden(game, n), tokens=grid(jnp.int32, game.codec.pad),
        meta=grid(jnp.int32), logp=grid(jnp.float32), reward=grid(jnp.float32),
        steps={k: jnp.zeros((n, spec.max_turns), d) for k, d in names.items()}, record=record, env=env,
    )  # fmt: skip


def _hidden(game: _Game, batch: int) -> Array:
    if game.policy is None:
        return jnp.zeros((batch, 1), jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    out = jax.eval_shape(game.policy.forward, game.params, tokens)
    return jnp.zeros((batch, out.hidden.shape[-1]), out.hidden.dtype)


def _keep(game: _Game, slots: Slots, turn: Array, which: Array) -> Slots:
    """Notes ``record`` and the anchor of the state before action ``turn``, where ``which``."""
    if game.record is not None:
        now = jax.vmap(game.record)(slots.env)
        at = (jnp.arange(game.env.spec.max_turns + 1) == turn[:, None]) & which[:, None]
        put = lambda old, new: jnp.where(at.reshape(at.shape + (1,) * (new.ndim - 1)), new[:, None], old)  # noqa: E731
        slots = slots._replace(record=jax.tree.map(put, slots.record, now))
    return slots


def _note(slots: Slots, turn: Array, which: Array, values: dict[str, Array]) -> Slots:
    """Writes per-turn values at ``turn [B]``, where ``which``."""
    at = (jnp.arange(slots.steps["played"].shape[1]) == turn[:, None]) & which[:, None]
    steps = {k: jnp.where(at, values[k][:, None], v) if k in values else v for k, v in slots.steps.items()}
    return slots._replace(steps=steps)


def _anchor(game: _Game, env: PyTree, observation: Text) -> Array:
    if game.env.anchor is not None:
        return jax.vmap(game.env.anchor)(env).astype(jnp.uint32)
    return jax.vmap(text.hash_)(observation)


def _begin(game: _Game, count: Array, batch: int) -> Slots:
    """Fresh rows for the ``count``-th active episodes, idle beyond the last."""
    fresh = _empty(game, batch)
    some = count < game.active_count
    episode = game.order.at[count].get(mode="clip")
    fresh = fresh._replace(
        episode=episode, phase=jnp.where(some, RUN, IDLE), env=stream.gather(game.first_state, episode)
    )
    observation = stream.gather(game.first_step.observation, episode)
    fresh = _keep(game, fresh, fresh.turn, some)
    fresh = _note(fresh, fresh.turn, some, {"anchor": _anchor(game, fresh.env, observation)})
    return _open_turn(game, fresh, observation, some, jnp.ones_like(some), jnp.zeros_like(some))


def _first_carry(game: _Game) -> _Carry:
    sizes = game.sizes
    count = jnp.arange(sizes.slots, dtype=jnp.int32)
    slots = _begin(game, count, sizes.slots)
    cache = None if game.policy is None else game.policy.init_cache(sizes.slots, sizes.max_tokens)
    rows = _empty(game, sizes.episodes * sizes.segments)._replace(hidden=None, env=None)
    zero = jnp.zeros((), jnp.int32)
    carry = _Carry(slots, cache, rows, zero + sizes.slots, RolloutStats(zero, zero, zero, zero))
    if game.policy is None:
        return carry
    # The first prompts are fed at full width; the chunks of a row are the same as in `_feed`.
    return control.while_any(lambda c: _hungry(c.slots), lambda c: _feed_rows(game, c, None), carry)


def _hungry(slots: Slots) -> Array:
    return (slots.phase == RUN) & (slots.cached < slots.length)


def _iterate(game: _Game, carry: _Carry) -> _Carry:
    slots = carry.slots
    age = jnp.where(_waiting(slots), slots.age + 1, 0)
    stats = carry.stats._replace(iterations=carry.stats.iterations + 1)
    carry = carry._replace(slots=slots._replace(age=age), stats=stats)
    carry = control.while_any(lambda c: _due(game, c.slots), lambda c: _serve(game, c), carry)
    if game.policy is None:
        return carry
    carry = control.while_any(lambda c: _hungry(c.slots), lambda c: _feed(game, c), carry)
    ready = control.any_(carry.slots.phase == RUN)
    slots, cache, decoded = jax.lax.cond(
        ready,
        lambda s, c: _decode(game, s, c),
        lambda s, c: (s, c, jnp.zeros((), jnp.int32)),
        carry.slots,
        carry.cache,
    )
    stats = carry.stats._replace(decoded=carry.stats.decoded + decoded)
    return carry._replace(slots=slots, cache=cache, stats=stats)


def _waiting(slots: Slots) -> Array:
    return (slots.phase == WAIT) | (slots.phase == DONE)


def _due(game: _Game, slots: Slots) -> Array:
    """Whether environments should be stepped now: enough wait, none can decode, or the oldest has waited long
    enough."""
    waiting = _waiting(slots)
    number = jnp.sum(waiting)
    enough = 2 * number >= game.sizes.env_rows
    stuck = ~jnp.any(slots.phase == RUN)
    old = jnp.any(waiting & (slots.age >= game.sizes.max_wait))
    return (number > 0) & (enough | stuck | old)


def _pick(which: Array, number: int) -> Array:
    """Indices of up to ``number`` true elements; out of range beyond."""
    return jnp.nonzero(which, size=number, fill_value=which.shape[0])[0].astype(jnp.int32)


def _serve(game: _Game, carry: _Carry) -> _Carry:
    """Steps up to ``env_rows`` waiting rows; closed rows go to the output and their slots take the next episode."""
    waiting = _waiting(carry.slots)
    _, rows = jax.lax.top_k(jnp.where(waiting, carry.slots.age + 1, 0), game.sizes.env_rows)
    valid = waiting[rows]
    sub = stream.gather(carry.slots, rows)
    stepping = valid & (sub.phase == WAIT)
    # An action that its budget cut, and that the environment never sees, is counted too.
    sub = _note(sub, sub.turn, valid & (sub.phase == DONE) & sub.cut, {"cut": sub.cut})
    sub, over, restart, observation = _step(game, sub, stepping)
    over |= valid & (sub.phase == DONE)
    closed = over | restart
    outputs = _flush(game, carry.rows, sub, closed, over)
    order = carry.next + jnp.cumsum(over, dtype=jnp.int32) - 1
    sub = _next_segment(game, sub, observation, restart)
    sub = stream.where(over, _begin(game, order, rows.shape[0]), sub)
    sub = sub._replace(age=jnp.zeros_like(sub.age))
    slots = stream.scatter(carry.slots, jnp.where(valid, rows, game.sizes.slots), sub)
    stats = carry.stats._replace(steps=carry.stats.steps + jnp.sum(stepping, dtype=jnp.int32))
    return carry._replace(slots=slots, rows=outputs, next=carry.next + jnp.sum(over, dtype=jnp.int32), stats=stats)


def _step(game: _Game, sub: Slots, go: Array) -> tuple[Slots, Array, Array, Text]:
    """One environment step where ``go``: ``(rows, episode over, context restarts, observation)``."""
    spec, turn = game.env.spec, sub.turn
    keys = jax.vmap(lambda k, t: jax.random.fold_in(k, 2 * t))(game.env_keys[sub.episode], turn)
    action = stream.action_text(game.codec, sub, game.budget, spec.max_action)
    params, axis = _env_params(game, sub.episode)

    def one(key, state, action, params):
        state, ts = game.env.step(key, state, action, params)
        return state, canonical(ts, spec)

    state, ts = jax.vmap(one, (0, 0, 0, axis))(keys, sub.env, action, params)
    state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, sub.env)
    last = (jnp.arange(game.sizes.max_tokens) == sub.length[:, None] - 1) & go[:, None]
    sub = sub._replace(
        env=stream.where(go, state, sub.env),
        reward=jnp.where(last, ts.reward[:, None], sub.reward),
        turn=jnp.where(go, turn + 1, turn),
    )
    thinking = jax.vmap(lambda a: text.rfind(a, text.literal("\n")) + 1)(action)
    values = {"reward": ts.reward, "cut": sub.cut, "played": go, "thinking": thinking, **(ts.info or {})}
    sub = _note(_keep(game, sub, sub.turn, go), turn, go, values)
    terminated = go & ts.terminated
    over_turns = turn + 1 >= spec.max_turns
    no_room = ts.restart & (sub.segment + 1 >= game.sizes.segments)
    truncated = go & ~terminated & (ts.truncated | over_turns | no_room)
    over, restart = terminated | truncated, go & ts.restart & ~terminated & ~truncated
    sub = _note(sub, sub.turn, go & ~over & ~restart, {"anchor": _anchor(game, sub.env, ts.observation)})
    sub = _open_turn(game, sub, ts.observation, go & ~terminated & ~restart, jnp.zeros_like(go), truncated)
    return sub._replace(truncated=sub.truncated | truncated), over, restart, ts.observation


def _flush(game: _Game, rows: Slots, sub: Slots, closed: Array, over: Array) -> Slots:
    """Writes closed rows to the output; ``phase`` keeps how the row ended: DONE truncated, RUN terminated, IDLE
    neither."""
    index = jnp.where(closed, sub.episode * game.sizes.segments + sub.segment, rows.length.shape[0])
    ended = jnp.where(over, jnp.where(sub.truncated, DONE, RUN), IDLE)
    return stream.scatter(rows, index, sub._replace(phase=ended, hidden=None, env=None))


def _next_segment(game: _Game, sub: Slots, observation: Text, restart: Array) -> Slots:
    """Opens a new row of the same episode where the context restarts."""
    fresh = _empty(game, restart.shape[0])._replace(
        episode=sub.episode, segment=sub.segment + 1, phase=sub.phase, turn=sub.turn, written=sub.written, env=sub.env
    )
    anchor = {"anchor": _anchor(game, sub.env, observation)}
    fresh = _note(_keep(game, fresh, fresh.turn, restart), fresh.turn, restart, anchor)
    fresh = _open_turn(game, fresh, observation, restart, jnp.ones_like(restart), jnp.zeros_like(restart))
    return stream.where(restart, fresh, sub)


def _feed(game: _Game, carry: _Carry) -> _Carry:
    """Feeds one chunk to up to ``feed_rows`` gathered rows."""
    return _feed_rows(game, carry, _pick(_hungry(carry.slots), game.sizes.feed_rows))


def _feed_rows(game: _Game, carry: _Carry, rows: Array | None) -> _Carry:
    """Feeds one chunk to the given rows, or to every row (None)."""
    assert game.policy is not None
    slots, sizes = carry.slots, game.sizes
    view = (slots.tokens, slots.cached, slots.length, _hungry(slots))
    tokens, cached, length, go = view if rows is None else stream.gather(view, rows)
    if rows is not None:
        go &= rows < sizes.slots
    count = jnp.where(go, jnp.minimum(sizes.chunk, length - cached), 0)
    index = jnp.minimum(cached[:, None] + jnp.arange(sizes.chunk, dtype=jnp.int32), sizes.max_tokens - 1)
    ids = jnp.take_along_axis(tokens, index, axis=1)
    cache = carry.cache if rows is None else stream.gather(carry.cache, rows)
    out, cache = game.policy.extend(game.params, cache, ids, cached, count)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    if rows is None:
        hidden = jnp.where((count > 0)[:, None], last, slots.hidden)
        slots = slots._replace(hidden=hidden, cached=cached + count)
    else:
        cache = stream.scatter(carry.cache, rows, cache)
        put = stream.scatter((slots.hidden, slots.cached), jnp.where(go, rows, sizes.slots), (last, cached + count))
        slots = slots._replace(hidden=put[0], cached=put[1])
    stats = carry.stats._replace(fed=carry.stats.fed + jnp.sum(count, dtype=jnp.int32))
    return carry._replace(slots=slots, cache=cache, stats=stats)


def _decode(game: _Game, slots: Slots, cache: PyTree) -> tuple[Slots, PyTree, Array]:
    """Samples one token on every row that can, and processes it unless it closed the action."""
    assert game.policy is not None
    ready = slots.phase == RUN
    keys = jax.vmap(jax.random.fold_in)(game.token_keys[slots.episode], slots.written)
    uniform = jax.vmap(lambda k: jax.random.uniform(k, dtype=jnp.float32))(keys)
    logits = game.policy.logits(game.params, slots.hidden)
    allowed = jnp.asarray(game.codec.sampleable)
    temperature = game.start.temperature[slots.episode]
    token, logp = sampling.sample(uniform, logits, temperature, allowed=allowed, **game.filters)
    slots = stream.append_sample(slots, ready, token, logp)
    ended = ready & (token == game.codec.end_action)
    cut = ready & ~ended & (slots.length - slots.began >= game.budget)
    full = ready & ~ended & ~cut & (slots.length >= game.sizes.max_tokens)
    stop = full | (cut & (game.env.spec.cut_action == "end"))
    phase = jnp.where(stop, DONE, jnp.where(ended | cut, WAIT, slots.phase))
    slots = slots._replace(phase=phase, cut=slots.cut | cut, truncated=slots.truncated | stop)
    count = (phase == RUN).astype(jnp.int32)
    out, cache = game.policy.extend(game.params, cache, token[:, None], slots.cached, count)
    hidden = jnp.where((count > 0)[:, None], out.hidden[:, 0], slots.hidden)
    slots = slots._replace(hidden=hidden, cached=slots.cached + count)
    return slots, cache, jnp.sum(ready, dtype=jnp.int32)


def _trajectory(game: _Game, rows: Slots, version: Array | int) -> Trajectory:
    count, segments = game.sizes.episodes * game.sizes.segments, game.sizes.segments
    episode = jnp.arange(count, dtype=jnp.int32) // segments
    mask, expert, turn = stream.unpack(rows.meta, rows.length)
    none = jnp.full(count, -1, jnp.int32)
    return Trajectory(
        tokens=rows.tokens, mask=mask, expert=expert, logp=rows.logp, reward=rows.reward, turn=turn, length=rows.length,
        terminated=rows.phase == RUN, truncated=rows.phase == DONE,
        task=game.start.task[episode], group=game.start.group[episode], episode=episode,
        role=jnp.zeros(count, jnp.int32), segment=jnp.arange(count, dtype=jnp.int32) % segments,
        version=jnp.broadcast_to(jnp.asarray(version, jnp.int32), (count,)), parent=none, branch=none,
        temperature=game.start.temperature[episode], steps=rows.steps, record=rows.record,
    )  # fmt: skip
