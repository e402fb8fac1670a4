"""What happens to rows of the stream at the border of a turn: they open, step their environment, close, and go on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentrl_jax import stream, text
from agentrl_jax.envs.base import canonical
from agentrl_jax.game import STEPS, Game, env_params_of
from agentrl_jax.stream import DONE, IDLE, RUN, WAIT, Slots
from agentrl_jax.types import Array, Prefix, PyTree, Text


def begin(game: Game, count: Array, batch: int) -> Slots:
    """Fresh rows for the ``count``-th active episodes, idle beyond the last."""
    fresh = empty(game, batch)
    some = count < game.active_count
    episode = game.order.at[count].get(mode="clip")
    fresh = fresh._replace(
        episode=episode, phase=jnp.where(some, RUN, IDLE), env=stream.gather(game.first_state, episode)
    )
    observation = stream.gather(game.first_step.observation, episode)
    fresh = _keep(game, fresh, fresh.turn, some)
    fresh = note(fresh, fresh.turn, some, {"anchor": _anchor(game, fresh.env, observation)})
    if game.prefix is not None:
        prefix = stream.gather(game.prefix, episode)
        going = some & (prefix.length > 0)
        fresh, some = stream.where(going, _resume(fresh, prefix), fresh), some & ~going
    return _open_turn(game, fresh, observation, some, jnp.ones_like(some), jnp.zeros_like(some))


def _resume(slots: Slots, prefix: Prefix) -> Slots:
    """Rows as they stood when their prefix was cut, all of it still to be fed."""
    like = lambda new, old: new.astype(old.dtype)  # noqa: E731
    return slots._replace(
        length=prefix.length,
        began=prefix.began,
        turn=prefix.turns,
        written=prefix.written,
        tokens=prefix.tokens,
        meta=stream.pack(prefix.mask, prefix.expert, prefix.turn),
        logp=prefix.logp,
        reward=prefix.reward,
        steps={name: like(prefix.steps[name], old) for name, old in slots.steps.items()},
        record=None if slots.record is None else jax.tree.map(like, prefix.record, slots.record),
        env=prefix.env,
    )


def step(game: Game, sub: Slots, go: Array) -> tuple[Slots, Array, Array, Text]:
    """One environment step where ``go``: ``(rows, episode over, context restarts, observation)``."""
    spec, turn = game.env.spec, sub.turn
    keys = jax.vmap(lambda k, t: jax.random.fold_in(k, 2 * t))(game.env_keys[sub.episode], turn)
    action = stream.action_text(game.codec, sub, game.budget, spec.max_action)
    params, axis = env_params_of(game, sub.episode)

    def one(key, state, action, params):
        state, ts = game.env.step(key, state, action, params)
        return state, canonical(ts, spec)

    state, ts = jax.vmap(one, (0, 0, 0, axis))(keys, sub.env, action, params)
    state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, sub.env)
    last = (jnp.arange(game.sizes.max_tokens) == sub.length[:, None] - 1) & go[:, None]
    sub = sub._replace(
        env=stream.where(go, state, sub.env),
        reward=jnp.where(last, jnp.asarray(ts.reward)[:, None], sub.reward),
        turn=jnp.where(go, turn + 1, turn),
    )
    thinking = jax.vmap(text.above_last_line)(action)
    values = {"reward": ts.reward, "cut": sub.cut, "played": go, "thinking": thinking, **(ts.info or {})}
    sub = note(_keep(game, sub, sub.turn, go), turn, go, values)
    terminated = go & ts.terminated
    over_turns = turn + 1 >= spec.max_turns
    no_room = ts.restart & (sub.segment + 1 >= game.sizes.segments)
    truncated = go & ~terminated & (ts.truncated | over_turns | no_room)
    over, restart = terminated | truncated, go & ts.restart & ~terminated & ~truncated
    sub = note(sub, sub.turn, go & ~over & ~restart, {"anchor": _anchor(game, sub.env, ts.observation)})
    sub = _open_turn(game, sub, ts.observation, go & ~terminated & ~restart, jnp.zeros_like(go), truncated)
    return sub._replace(truncated=sub.truncated | truncated), over, restart, ts.observation


def flush(game: Game, rows: Slots, sub: Slots, closed: Array, over: Array) -> Slots:
    """Writes closed rows to the output; ``phase`` keeps how the row ended: DONE truncated, RUN terminated, IDLE
    neither."""
    index = jnp.where(closed, sub.episode * game.sizes.segments + sub.segment, rows.length.shape[0])
    ended = jnp.where(over, jnp.where(sub.truncated, DONE, RUN), IDLE)
    return stream.scatter(rows, index, sub._replace(phase=ended, hidden=None, env=None))


def next_segment(game: Game, sub: Slots, observation: Text, restart: Array) -> Slots:
    """Opens a new row of the same episode where the context restarts."""
    fresh = empty(game, restart.shape[0])._replace(
        episode=sub.episode, segment=sub.segment + 1, phase=sub.phase, turn=sub.turn, written=sub.written, env=sub.env
    )
    anchor = {"anchor": _anchor(game, sub.env, observation)}
    fresh = note(_keep(game, fresh, fresh.turn, restart), fresh.turn, restart, anchor)
    fresh = _open_turn(game, fresh, observation, restart, jnp.ones_like(restart), jnp.zeros_like(restart))
    return stream.where(restart, fresh, sub)


def empty(game: Game, batch: int) -> Slots:
    """Rows without an episode."""
    n, spec, sizes = batch, game.env.spec, game.sizes
    zero, off = jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
    grid = lambda dtype, fill=0: jnp.full((n, sizes.max_tokens), fill, dtype)  # noqa: E731
    names = dict(spec.info) | STEPS
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


def _hidden(game: Game, batch: int) -> Array:
    if game.policy is None:
        return jnp.zeros((batch, 1), jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    out = jax.eval_shape(game.policy.forward, game.params, tokens)
    return jnp.zeros((batch, out.hidden.shape[-1]), out.hidden.dtype)


def _open_turn(game: Game, slots: Slots, observation: Text, go: Array, first: Array, last: Array) -> Slots:
    """Appends an observation where ``go``: opens the row where ``first``, closes it (no action follows) where
    ``last``.

    The opening of the action stands behind the last observation too: a critic is trained on what precedes an agent's
    words, so nowhere else could the bootstrap be read.
    """
    ids, count = stream.observation_block(game.codec, observation, first)
    after = stream.append(slots, ids, jnp.where(go, count, 0))
    after = after._replace(
        began=jnp.where(go, after.length, slots.began),
        cut=slots.cut & ~go,
        phase=jnp.where(go, jnp.where(last, DONE, RUN), slots.phase),
    )
    full = go & ~last & (after.length >= game.sizes.max_tokens)
    after = after._replace(phase=jnp.where(full, DONE, after.phase), truncated=after.truncated | full)
    return _expert_turn(game, after)


def _expert_turn(game: Game, slots: Slots) -> Slots:
    """Lets the expert write the next action on rows whose turn is the teacher's; they wait for the environment at
    once. An action beyond the budget is cut, as a sampled one is; one that a prefix began is written on."""
    if game.env.expert is None or game.teacher_turns is None:
        return slots
    mine = slots.phase == RUN
    if game.policy is not None:
        mine &= slots.turn < game.teacher_turns[slots.episode]
    keys = jax.vmap(lambda k, t: jax.random.fold_in(k, 2 * t + 1))(game.env_keys[slots.episode], slots.turn)
    params, axis = env_params_of(game, slots.episode)
    action = jax.vmap(game.env.expert, (0, 0, axis))(keys, slots.env, params)
    ids, count = stream.action_block(game.codec, action, game.budget)
    if game.prefix is not None:
        count = jnp.minimum(count, game.budget - (slots.length - slots.began))
    after = stream.append(slots, ids, jnp.where(mine, count, 0), written=True)
    whole = after.length - slots.length == count
    ended = jnp.take_along_axis(ids, count[:, None] - 1, axis=1)[:, 0] == game.codec.end_action
    cut = mine & whole & ~ended
    stop = mine & (~whole | (cut & (game.env.spec.cut_action == "end")))
    phase = jnp.where(stop, DONE, jnp.where(mine, WAIT, slots.phase))
    return after._replace(phase=phase, cut=slots.cut | cut, truncated=slots.truncated | stop)


def _keep(game: Game, slots: Slots, turn: Array, which: Array) -> Slots:
    """Notes ``record`` of the state before action ``turn``, where ``which``."""
    if game.record is not None:
        now = jax.vmap(game.record)(slots.env)
        at = (jnp.arange(game.env.spec.max_turns + 1) == turn[:, None]) & which[:, None]
        put = lambda old, new: jnp.where(at.reshape(at.shape + (1,) * (new.ndim - 1)), new[:, None], old)  # noqa: E731
        slots = slots._replace(record=jax.tree.map(put, slots.record, now))
    return slots


def note(slots: Slots, turn: Array, which: Array, values: dict[str, Array]) -> Slots:
    """Writes per-turn values at ``turn [B]``, where ``which``."""
    at = (jnp.arange(slots.steps["played"].shape[1]) == turn[:, None]) & which[:, None]
    steps = {k: jnp.where(at, values[k][:, None], v) if k in values else v for k, v in slots.steps.items()}
    return slots._replace(steps=steps)


def _anchor(game: Game, env: PyTree, observation: Text) -> Array:
    if game.env.anchor is not None:
        return jax.vmap(game.env.anchor)(env).astype(jnp.uint32)
    return jax.vmap(text.hash_)(observation)
