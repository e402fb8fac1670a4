"""Collectors under the tools of a real step, compiled once each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CODEC, POLICY

import agentrl_jax.train as train
from agentrl_jax.algorithm import Algorithm, Shape, Tools, TrainState
from agentrl_jax.rollout import rollout
from agentrl_jax.train import make_hyper
from agentrl_jax.types import Start, Trajectory


def lend(env, config, params, part, step=0):
    """The tools of a step with these parameters."""
    algorithm = Algorithm(part.name, *[None] * 3, dict(part.hyper), part.needs)
    state = TrainState(step, {"policy": params}, None, None, None, None, make_hyper(algorithm, env), None)
    return train._tools(POLICY, CODEC, env, algorithm, config, state, rollout)


def spied(tools):
    """The tools, and a list in which every trajectory that they roll is kept."""
    spy = []

    def roll(*args, **kwargs):
        spy.append(tools.roll(*args, **kwargs))
        return spy[-1]

    return tools._replace(roll=roll), spy


def shape(env, config):
    return Shape(config.episodes, config.group_size, config.max_tokens, env.spec.max_turns)


def numbers(part, **changed):
    return {k: jnp.float32(v) for k, v in (part.hyper | changed).items()}


def collector(part, env, config):
    """``(memory, params, key, hyper) -> (memory, trajectory)``."""
    return lambda memory, params, key, hyper: part.collect(memory, lend(env, config, params, part), hyper, key)


def toy(config, turns=4, *, pays=None):
    """Tools whose rollouts are made up: they cost nothing, and depend on their key, call and start alone.

    Half of the episodes succeed, or those of the tasks that ``pays`` says. The expert needs ``1 + task % turns`` turns,
    and ``steps["taught"]`` keeps the turns asked of it.
    """
    segments, width = config.segments, config.max_tokens

    def roll(key, call=0, start=None, expert=False, episodes=None, group_size=None, record=False):
        start, n = start or Start(), episodes or config.episodes
        group = jnp.arange(n, dtype=jnp.int32) // (group_size or config.group_size)
        group = group if start.group is None else start.group
        bits = jax.random.bits(jax.random.fold_in(key, call), (n, segments, width + 8), jnp.uint32) >> 8
        bits = bits.astype(jnp.int32)
        task = bits[:, 0, 0][group] % 1000 if start.task is None else start.task
        active = jnp.ones(n, bool) if start.active is None else start.active
        taught = jnp.zeros(n, jnp.int32) if start.teacher_turns is None else start.teacher_turns
        paid = active & (bits[:, 0, 1] % 2 == 1 if pays is None else pays(task))
        of_row = lambda x: jnp.repeat(x, segments, axis=0)  # noqa: E731
        bits, row = bits.reshape(n * segments, -1), jnp.arange(n * segments, dtype=jnp.int32)
        length = jnp.where(of_row(active), 3 + bits[:, 2] % (width - 2), 0)
        real = jnp.arange(width) < length[:, None]
        mask = real & (jnp.arange(width) >= 2)
        written = mask & of_row(taught > 0)[:, None]
        last = row % segments == segments - 1
        first = (jnp.arange(turns) == 0) & last[:, None]
        played = jnp.arange(turns) < jnp.where(expert, 1 + task % turns, 1)[:, None]
        none, heat = jnp.full_like(row, -1), jnp.ones(row.shape)
        counts = {x: first * (bits[:, i] % 2)[:, None] * 1.0 for i, x in enumerate(("tool_calls", "malformed"), 3)}
        reward = (last & of_row(paid)).astype(jnp.float32)
        steps = {
            "reward": first * reward[:, None], "played": of_row(played & active[:, None]) & last[:, None],
            "answered": first * 1.0, "taught": first * of_row(taught)[:, None], **counts,
        }  # fmt: skip
        return Trajectory(
            tokens=jnp.where(real, bits[:, 8:] % 256, CODEC.pad), mask=mask,
            expert=written, logp=jnp.where(mask & ~written, -1.0, 0.0),
            reward=jnp.where(jnp.arange(width) == 2, reward[:, None], 0.0), turn=jnp.where(real, 0, -1),
            length=length, terminated=of_row(active) & last, truncated=row < 0, task=of_row(task), group=of_row(group),
            episode=row // segments, role=jnp.zeros_like(row), segment=row % segments, version=jnp.zeros_like(row),
            parent=none, branch=none, temperature=heat, steps=steps,
        )  # fmt: skip

    groups = config.episodes // config.group_size
    return Tools(
        roll, lambda *args: None, config.episodes, config.group_size, groups, segments, True, width, turns, CODEC
    )  # fmt: skip


def together_as_alone(part, config, members=4):
    """A collector over members of a ``vmap``, on made-up rollouts, gives each what it gets alone; its memory keeps its
    types, so that steps can be scanned. Returns what was collected, by member."""
    tools = toy(config)
    memory = part.init(jax.random.key(0), Shape(config.episodes, config.group_size, config.max_tokens, tools.max_turns))
    hyper = numbers(part)
    run = jax.jit(lambda memory, key: part.collect(memory, tools, hyper, key))
    keys = jax.random.split(jax.random.key(7), members)
    memories = [run(memory, jax.random.key(i))[0] if i % 2 else memory for i in range(members)]
    assert all(typed(m) == typed(memory) for m in memories)
    together = jax.jit(jax.vmap(run))(stack(*memories), keys)
    for i in range(members):
        same(at(together, i), run(memories[i], keys[i]))
    return jax.tree.map(np.asarray, together[1])


def stack(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def at(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def same(a, b, tolerance=1e-5):
    """Equal in everything, numbers up to rounding."""
    raw = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_allclose(raw(x), raw(y), rtol=tolerance, atol=tolerance), a, b)


def typed(tree):
    """Shapes and dtypes, weak ones told apart: what a ``scan`` must find unchanged."""
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


def well_formed(traj, config, *, groups=None):
    """The contract of a trajectory of a step: order, ids, padding, and no reward lost."""
    traj = jax.tree.map(np.asarray, traj)
    rows = np.arange(config.episodes * config.segments)
    np.testing.assert_array_equal(traj.episode, rows // config.segments)
    np.testing.assert_array_equal(traj.segment, rows % config.segments)
    equal = rows // (config.segments * config.group_size)
    np.testing.assert_array_equal(traj.group, equal if groups is None else groups)
    real = np.arange(config.max_tokens) < traj.length[:, None]
    assert np.all((traj.tokens == CODEC.pad) == ~real) and np.all((traj.turn == -1) == ~real)
    assert not np.any(traj.mask & ~real) and not np.any(traj.expert & ~traj.mask)
    assert not np.any(traj.logp[~traj.mask | traj.expert]) and np.all(traj.logp <= 0)
    np.testing.assert_allclose(traj.reward.sum(1), traj.steps["reward"].sum(1), atol=1e-6)
    for g in np.unique(traj.group):
        assert len(np.unique(traj.task[traj.group == g])) == 1, "group mates share a task"
