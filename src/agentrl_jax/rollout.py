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

from agentrl_jax import control, sampling, stream, turns
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment
from agentrl_jax.game import (
    TASK_SEED,
    Game,
    Sizes,
    assign_tasks,
    check,
    check_numbers,
    check_start,
    check_vocabulary,
    prepare,
)
from agentrl_jax.policy import Policy
from agentrl_jax.stream import DONE, IDLE, RUN, WAIT, Slots
from agentrl_jax.types import Array, PyTree, Start, Trajectory

__all__ = ["TASK_SEED", "RolloutStats", "Sizes", "assign_tasks", "check", "rollout", "rollout_with_stats"]


class RolloutStats(NamedTuple):
    """What the schedule did: ``iterations`` of the loop, ``decoded`` tokens sampled, ``steps`` of environments,
    ``fed`` tokens."""

    iterations: Array
    decoded: Array
    steps: Array
    fed: Array


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
    check(policy, codec, env, sizes, start)
    check_numbers(temperature, top_k, top_p)
    check_start(start, episodes if episode_ids is None else None)
    if policy is not None:
        check_vocabulary(policy, codec, params)
    game = prepare(policy, codec, env, params, key, sizes, start, env_params, temperature, episode_ids, record)
    filters = {"top_k": top_k, "top_p": top_p}
    game = game._replace(filters={k: jnp.asarray(v) for k, v in filters.items() if v is not None})
    carry = _first_carry(game)
    carry = jax.lax.while_loop(lambda c: control.any_(c.slots.phase != IDLE), lambda c: _iterate(game, c), carry)
    return _trajectory(game, carry.rows, version), carry.stats


def _first_carry(game: Game) -> _Carry:
    sizes = game.sizes
    count = jnp.arange(sizes.slots, dtype=jnp.int32)
    slots = turns.begin(game, count, sizes.slots)
    cache = None if game.policy is None else game.policy.init_cache(sizes.slots, sizes.max_tokens)
    rows = turns.empty(game, sizes.episodes * sizes.segments)._replace(hidden=None, env=None)
    zero = jnp.zeros((), jnp.int32)
    carry = _Carry(slots, cache, rows, zero + sizes.slots, RolloutStats(zero, zero, zero, zero))
    if game.policy is None:
        return carry
    # The first prompts are fed at full width; the chunks of a row are the same as in `_feed`.
    return control.while_any(lambda c: _hungry(c.slots), lambda c: _feed_rows(game, c, None), carry)


def _hungry(slots: Slots) -> Array:
    return (slots.phase == RUN) & (slots.cached < slots.length)


def _iterate(game: Game, carry: _Carry) -> _Carry:
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


def _due(game: Game, slots: Slots) -> Array:
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


def _serve(game: Game, carry: _Carry) -> _Carry:
    """Steps up to ``env_rows`` waiting rows; closed rows go to the output and their slots take the next episode."""
    waiting = _waiting(carry.slots)
    _, rows = jax.lax.top_k(jnp.where(waiting, carry.slots.age + 1, 0), game.sizes.env_rows)
    valid = waiting[rows]
    sub = stream.gather(carry.slots, rows)
    stepping = valid & (sub.phase == WAIT)
    sub, over, restart, observation = turns.step(game, sub, stepping)
    # An action that its budget cut, and that the environment never sees, is counted too.
    sub = turns.note(sub, sub.turn, valid & (sub.phase == DONE) & sub.cut, {"cut": sub.cut})
    over |= valid & (sub.phase == DONE)
    closed = over | restart
    outputs = turns.flush(game, carry.rows, sub, closed, over)
    order = carry.next + jnp.cumsum(over, dtype=jnp.int32) - 1
    sub = turns.next_segment(game, sub, observation, restart)
    sub = stream.where(over, turns.begin(game, order, rows.shape[0]), sub)
    sub = sub._replace(age=jnp.zeros_like(sub.age))
    slots = stream.scatter(carry.slots, jnp.where(valid, rows, game.sizes.slots), sub)
    stats = carry.stats._replace(steps=carry.stats.steps + jnp.sum(stepping, dtype=jnp.int32))
    return carry._replace(slots=slots, rows=outputs, next=carry.next + jnp.sum(over, dtype=jnp.int32), stats=stats)


def _feed(game: Game, carry: _Carry) -> _Carry:
    """Feeds one chunk to up to ``feed_rows`` gathered rows."""
    return _feed_rows(game, carry, _pick(_hungry(carry.slots), game.sizes.feed_rows))


def _feed_rows(game: Game, carry: _Carry, rows: Array | None) -> _Carry:
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


def _decode(game: Game, slots: Slots, cache: PyTree) -> tuple[Slots, PyTree, Array]:
    """Samples one token on every row that can, and processes it unless it closed the action."""
    assert game.policy is not None
    ready = slots.phase == RUN
    keys = jax.vmap(jax.random.fold_in)(game.token_keys[slots.episode], slots.written)
    uniform = jax.vmap(lambda k: jax.random.uniform(k, dtype=jnp.float32))(keys)
    logits = game.policy.logits(game.params, slots.hidden)
    allowed = jnp.asarray(game.codec.sampleable)
    temperature = game.temperature[slots.episode]
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


def _trajectory(game: Game, rows: Slots, version: Array | int) -> Trajectory:
    count, segments = game.sizes.episodes * game.sizes.segments, game.sizes.segments
    episode = jnp.arange(count, dtype=jnp.int32) // segments
    mask, expert, turn = stream.unpack(rows.meta, rows.length)
    none = jnp.full(count, -1, jnp.int32)
    parent, branch = (none, none) if game.prefix is None else (game.prefix.parent, game.prefix.branch)
    return Trajectory(
        tokens=rows.tokens, mask=mask, expert=expert, logp=rows.logp, reward=rows.reward, turn=turn, length=rows.length,
        terminated=rows.phase == RUN, truncated=rows.phase == DONE,
        task=game.task[episode], group=game.group[episode], episode=episode,
        role=jnp.zeros(count, jnp.int32), segment=jnp.arange(count, dtype=jnp.int32) % segments,
        version=jnp.broadcast_to(jnp.asarray(version, jnp.int32), (count,)), parent=parent, branch=branch,
        temperature=game.temperature[episode], steps=rows.steps, record=rows.record,
    )  # fmt: skip
