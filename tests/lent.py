"""Collectors under the tools of a real step, compiled once each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CODEC, POLICY

import agentrl_jax.train as train
from agentrl_jax.algorithm import Algorithm, Shape, TrainState
from agentrl_jax.rollout import rollout
from agentrl_jax.train import make_hyper


def lend(env, config, params, part, spy=None, step=0):
    """The tools of a step with these parameters; with a ``spy``, a list, every trajectory that is rolled goes there."""
    algorithm = Algorithm(part.name, *[None] * 3, dict(part.hyper), part.needs)
    state = TrainState(step, {"policy": params}, None, None, None, None, make_hyper(algorithm, env), None)
    tools = train._tools(POLICY, CODEC, env, algorithm, config, state, rollout)

    def roll(*args, **kwargs):
        spy.append(tools.roll(*args, **kwargs))
        return spy[-1]

    return tools if spy is None else tools._replace(roll=roll)


def shape(env, config):
    return Shape(config.episodes, config.group_size, config.max_tokens, env.spec.max_turns)


def numbers(part, **changed):
    return {k: jnp.float32(v) for k, v in (part.hyper | changed).items()}


def collector(part, env, config, *, spied=False):
    """``(memory, params, key, hyper) -> (memory, trajectory, all that was rolled, by call)``."""

    def run(memory, params, key, hyper):
        spy = [] if spied else None
        memory, traj = part.collect(memory, lend(env, config, params, part, spy), hyper, key)
        return memory, traj, spy

    return run


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
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), jax.core.get_aval(x).weak_type), tree)


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
