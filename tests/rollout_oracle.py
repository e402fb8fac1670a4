"""A slow rollout: one episode at a time, one token at a time, all of it recomputed; and an environment to try it on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CODEC

from agentrl_jax import sampling, text
from agentrl_jax.envs import Environment, EnvSpec, canonical, canonical_params
from agentrl_jax.policy import Policy
from agentrl_jax.rollout import TASK_SEED
from agentrl_jax.types import Text, TimeStep


class Row:
    """One context of an episode, as Python lists."""

    def __init__(self, segment: int):
        self.segment = segment
        self.tokens: list[int] = []
        self.kind: list[str] = []
        self.logp: list[float] = []
        self.reward: list[float] = []
        self.turn: list[int] = []
        self.terminated = self.truncated = False
        self.steps: dict[int, dict[str, Any]] = {}
        self.record: dict[int, Any] = {}

    def append(self, ids, kind: str, turn: int, limit: int, logp: float = 0.0):
        """Appends what fits."""
        for i in list(ids)[: limit - len(self.tokens)]:
            self.tokens.append(int(i))
            self.kind.append(kind)
            self.logp.append(logp)
            self.reward.append(0.0)
            self.turn.append(turn)


@functools.cache
def _functions(policy: Policy | None, env: Environment):
    def sample(params, tokens, length, key, temperature, filters):
        uniform = jax.random.uniform(key, (1,), jnp.float32)
        hidden = policy.forward(params, tokens).hidden[:, length - 1]
        allowed = jnp.asarray(CODEC.sampleable)
        out = sampling.sample(uniform, policy.logits(params, hidden), temperature[None], allowed=allowed, **filters)
        return out.token[0], out.logp[0]

    def step(key, state, action, params):
        state, ts = env.step(key, state, action, params)
        return state, canonical(ts, env.spec)

    def reset(key, params):
        state, ts = env.reset(key, params)
        return state, canonical(ts, env.spec)

    def keys(key, episode, task):
        task_key, play_key = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        mine = jax.random.fold_in(play_key, episode)
        drawn = jax.random.bits(jax.random.fold_in(task_key, task), dtype=jnp.uint32) >> 1
        return jax.random.fold_in(mine, 0), jax.random.fold_in(mine, 1), drawn

    return jax.jit(sample), jax.jit(step), jax.jit(reset), jax.jit(env.expert) if env.expert else None, jax.jit(keys)


_fold = jax.jit(jax.random.fold_in)


def _bytes(value: Text) -> list[int]:
    return np.asarray(value.data)[: int(value.length)].tolist()


def _text(ids: list[int], capacity: int) -> Text:
    data = [i for i in ids if i < 256][:capacity]
    return Text(jnp.asarray(data + [0] * (capacity - len(data)), jnp.uint8), jnp.int32(len(data)))


def play(
    policy, env, params, key, *, episode, max_tokens, group=None, task=None, env_params=None, temperature=1.0,
    segments=1, teacher_turns=0, record=None, filters=None,
) -> list[Row]:  # fmt: skip
    """The rows of one episode."""
    sample, step, reset, expert, make_keys = _functions(policy, env)
    env_params = canonical_params(env.params if env_params is None else env_params)
    token_key, env_key, drawn = make_keys(key, episode, episode if group is None else group)
    task = int(drawn) if task is None else task
    spec, budget = env.spec, env.spec.max_action + 1
    state, ts = reset(_fold(jax.random.key(TASK_SEED), task), env_params)
    row, rows, turn, written = Row(0), [], 0, 0
    rows.append(row)

    def note(which):
        if record is not None:
            row.record[which] = record(state)

    note(0)
    row.append([CODEC.start, CODEC.open_observation, *_bytes(ts.observation), CODEC.open_action], "seen", 0, max_tokens)
    while True:
        if len(row.tokens) >= max_tokens:
            row.truncated = True
            return rows
        began, cut = len(row.tokens), False
        if turn < teacher_turns:
            ids = [*_bytes(expert(_fold(env_key, 2 * turn + 1), state, env_params)), CODEC.end_action][:budget]
            row.append(ids, "expert", turn, max_tokens)
            written += len(row.tokens) - began
            stopped = len(row.tokens) - began < len(ids)
            cut = not stopped and ids[-1] != CODEC.end_action
        else:
            while True:
                padded = np.zeros((1, max_tokens), np.int32)
                padded[0, : len(row.tokens)] = row.tokens
                token, logp = sample(
                    params, padded, len(row.tokens), _fold(token_key, written), jnp.float32(temperature), filters or {}
                )
                row.append([token], "sampled", turn, max_tokens, float(logp))
                written += 1
                ended = int(token) == CODEC.end_action
                cut = not ended and len(row.tokens) - began >= budget
                stopped = not ended and not cut and len(row.tokens) >= max_tokens
                if ended or cut or stopped:
                    break
        if stopped or (cut and spec.cut_action == "end"):
            row.truncated = True
            if cut:
                row.steps[turn] = {"cut": True, "played": False}
            return rows
        action = _text(row.tokens[began:], spec.max_action)
        state, ts = step(_fold(env_key, 2 * turn), state, action, env_params)
        row.reward[-1] = float(ts.reward)
        row.steps[turn] = {"reward": float(ts.reward), "cut": cut, "played": True}
        row.steps[turn] |= {k: np.asarray(v) for k, v in ts.info.items()}
        turn += 1
        note(turn)
        if ts.terminated:
            row.terminated = True
            return rows
        opening = [CODEC.open_observation, *_bytes(ts.observation), CODEC.open_action]
        if ts.truncated or turn >= spec.max_turns or (ts.restart and len(rows) >= segments):
            row.append(opening, "seen", turn, max_tokens)
            row.truncated = True
            return rows
        if ts.restart:
            row = Row(len(rows))
            rows.append(row)
            note(turn)
            opening = [CODEC.start, *opening]
        row.append(opening, "seen", turn, max_tokens)


def assert_equal(traj, number: int, rows: list[Row], segments: int = 1, atol: float = 1e-5):
    """Rows of episode ``number`` of a trajectory (of NumPy arrays) against the oracle's."""
    at = lambda x: x[number * segments : (number + 1) * segments]  # noqa: E731
    for segment in range(segments):
        i = number * segments + segment
        if segment >= len(rows):
            assert traj.length[i] == 0 and not traj.mask[i].any() and not traj.terminated[i] and not traj.truncated[i]
            assert not any(np.any(v[i]) for v in traj.steps.values())
            continue
        row = rows[segment]
        n = len(row.tokens)
        assert traj.length[i] == n
        assert traj.tokens[i].tolist() == row.tokens + [CODEC.pad] * (traj.tokens.shape[1] - n)
        kind = np.asarray(row.kind + ["pad"] * (traj.tokens.shape[1] - n))
        np.testing.assert_array_equal(traj.mask[i], (kind == "sampled") | (kind == "expert"))
        np.testing.assert_array_equal(traj.expert[i], kind == "expert")
        assert traj.turn[i].tolist() == row.turn + [-1] * (traj.tokens.shape[1] - n)
        np.testing.assert_allclose(traj.logp[i, :n], row.logp, atol=atol)
        assert not traj.logp[i, n:].any()
        np.testing.assert_array_equal(traj.reward[i, :n], np.asarray(row.reward, np.float32))
        assert not traj.reward[i, n:].any()
        assert (traj.terminated[i], traj.truncated[i]) == (row.terminated, row.truncated)
        for k in range(traj.steps["played"].shape[1]):
            noted = row.steps.get(k, {})
            for name, value in traj.steps.items():
                if name not in ("anchor", "thinking"):
                    assert value[i, k] == noted.get(name, 0), (name, k)
        if traj.record is not None:
            for k, kept in row.record.items():
                jax.tree.map(lambda x, y, k=k, i=i: np.testing.assert_array_equal(x[i, k], y), traj.record, kept)
    assert at(traj.segment).tolist() == list(range(segments))


class Talk(NamedTuple):
    """Bytes of the prompt and at most of a reply; probabilities of what follows a turn."""

    prompt: int = 4
    reply: int = 6
    end: float = 0.1
    cut: float = 0.05
    restart: float = 0.25


class TalkState(NamedTuple):
    turn: jax.Array
    heard: jax.Array


NAMES = (b"<|end|>", b"</s>", b"end_action", b"\x00\xff", b"\n\nuser:", b"open_obs")


@functools.cache
def talk(cut_action: str = "deliver", max_turns: int = 4) -> Environment:
    """Says random bytes and names of control tokens, ends, is cut and restarts at random, and tells what it heard."""
    capacity = 12

    def say(key, length):
        which, name, data = jax.random.split(key, 3)
        noise = jax.random.bits(data, (capacity,), jnp.uint8)
        names = jnp.stack([text.literal(n, capacity).data for n in NAMES])
        chosen = jnp.where(jax.random.bernoulli(which), noise, names[jax.random.randint(name, (), 0, len(NAMES))])
        return Text(jnp.where(jnp.arange(capacity) < length, chosen, 0).astype(jnp.uint8), jnp.int32(length))

    def reset(key, params):
        return TalkState(jnp.int32(0), jnp.uint32(0)), TimeStep(observation=say(key, params.prompt))

    def step(key, state, action, params):
        keys = jax.random.split(key, 6)
        heard = text.hash_(action)
        chances = (params.end, params.cut, params.restart)
        over, cut, restart = (jax.random.bernoulli(k, p) for k, p in zip(keys[:3], chances, strict=True))
        ts = TimeStep(
            observation=say(keys[3], jax.random.randint(keys[4], (), 0, params.reply + 1)),
            reward=jax.random.normal(keys[5]), terminated=over, truncated=cut, restart=restart,
            info={"success": over, "heard": heard, "size": action.length},
        )  # fmt: skip
        return TalkState(state.turn + 1, heard), ts

    def expert(key, state, params):
        size, data = jax.random.split(key)
        length = jax.random.randint(size, (), 0, 6)
        noise = jax.random.bits(data, (5,), jnp.uint8)
        return Text(jnp.where(jnp.arange(5) < length, noise, 0).astype(jnp.uint8), length)

    info = (("success", "float32"), ("heard", "uint32"), ("size", "int32"))
    spec = EnvSpec(capacity, 5, max_turns, info=info, cut_action=cut_action)
    return Environment("talk", "1", spec, Talk(), reset, step, expert)
