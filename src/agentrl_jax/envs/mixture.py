"""A mixture of environments: one member per episode, drawn with traced weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from agentrl_jax.control import any_
from agentrl_jax.envs.base import Environment, EnvSpec, canonical
from agentrl_jax.envs.registry import memoised
from agentrl_jax.envs.wrappers import select, strong, turn_limit
from agentrl_jax.text import empty, hash_, resize
from agentrl_jax.types import Array, PyTree, Text, TimeStep


class MixtureParams(NamedTuple):
    """``weights``: relative, at least one positive, none negative. ``members``: every member's own parameters."""

    weights: tuple[float, ...]
    members: tuple[PyTree, ...]


class MixtureState(NamedTuple):
    """``env``: the member played, ``int32[]``. ``members``: a state for each. ``seen``: the observation's hash."""

    env: Array
    members: tuple[PyTree, ...]
    seen: Array


def mixture(envs: Sequence[Environment], weights: Sequence[float] | None = None) -> Environment:
    """Draws one of ``envs`` at reset, with probability proportional to ``params.weights`` (traced), and plays it.

    ``info["env"]`` is the member's index (int32) into ``spec.members``, their names; the other info names are the
    union (0 where a member has none). Training and evaluation report the success of every member by name.
    Members are stepped by a chain of guarded branches: one that no row of the batch plays costs nothing. A member
    with fewer turns than the longest is cut at its own limit; actions are cut to the member's ``max_action``.
    ``expert`` exists where every member has one.

    Raises:
      ValueError: no members; weights of another length, negative, not finite or all 0; members that disagree on
        ``roles``, ``cut_action``, the dtype of an info name, or (with ``cut_action="end"``) on ``max_action``; a
        member whose info has ``"env"``; (when traced) a member with ``inputs``.
    """
    envs = tuple(envs)
    weights = (1.0,) * len(envs) if weights is None else tuple(float(w) for w in weights)
    if not envs or len(weights) != len(envs):
        raise ValueError(f"mixture needs one weight for each of one or more members: {len(envs)}, {len(weights)}")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ValueError(f"mixture weights must be finite, not negative and not all 0, got {weights}")
    return _mixture(envs, weights)


def _mixture_spec(envs: tuple[Environment, ...]) -> EnvSpec:
    specs = [env.spec for env in envs]
    for field in ("roles", "cut_action"):
        if len({getattr(spec, field) for spec in specs}) > 1:
            raise ValueError(f"mixture members disagree on {field}: {[(e.name, getattr(e.spec, field)) for e in envs]}")
    if specs[0].cut_action == "end" and len({spec.max_action for spec in specs}) > 1:
        raise ValueError(f"members with cut_action 'end' must share max_action: {[s.max_action for s in specs]}")
    info = {"env": "int32"}
    for env in envs:
        for name, dtype in env.spec.info:
            if name == "env" or info.setdefault(name, dtype) != dtype:
                raise ValueError(f"mixture: info {name!r} ({dtype}) of {env.name} conflicts with {info[name]}")
    return EnvSpec(
        max_observation=max(spec.max_observation for spec in specs),
        max_action=max(spec.max_action for spec in specs),
        max_turns=max(spec.max_turns for spec in specs),
        roles=specs[0].roles,
        info=tuple(info.items()),
        cut_action=specs[0].cut_action,
        members=_distinct([env.name for env in envs]),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; ``.2``, ``.3``, ... follows one that stood before."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name}.{count}" for name, count in zip(names, counts, strict=True))


def _chain(index: Array, members: Sequence[Callable[[], PyTree]], default: PyTree) -> PyTree:
    """``members[index]()``; one that no row asks for is not computed, and rows that did not ask keep what they have.

    A chain of ``cond`` and not a ``switch``: under ``vmap`` a switch pays for every branch.
    """
    for i, member in enumerate(members):
        mine = index == i
        default = jax.lax.cond(
            any_(mine), lambda old, member=member, mine=mine: select(mine, member(), old), lambda old: old, default
        )
    return default


def _replaced(members: tuple[PyTree, ...], i: int, new: PyTree) -> tuple[PyTree, ...]:
    return (*members[:i], new, *members[i + 1 :])


def _zeros(fn: Callable[[], PyTree]) -> PyTree:
    """Zeros in the shapes that ``fn`` would return."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn))


@memoised
def _mixture(envs: tuple[Environment, ...], weights: tuple[float, ...]) -> Environment:
    spec = _mixture_spec(envs)
    envs = tuple(e if e.spec.max_turns == spec.max_turns else turn_limit(e, e.spec.max_turns) for e in envs)
    hashed = any(env.anchor for env in envs)

    def common(ts: TimeStep, i: int) -> TimeStep:
        if ts.inputs is not None:
            raise ValueError(f"mixture: {envs[i].name} has inputs, which members cannot share")
        ts = canonical(ts._replace(observation=resize(ts.observation, spec.max_observation)[0]), spec)
        return ts._replace(info={**(ts.info or {}), "env": jnp.int32(i)})

    def finish(index, out):
        members, ts = out
        return MixtureState(index, members, hash_(ts.observation) if hashed else jnp.uint32(0)), ts

    def reset(key, params):
        pick, key = jax.random.split(key)
        index = jax.random.categorical(pick, jnp.log(jnp.maximum(jnp.asarray(params.weights), 0.0))).astype(jnp.int32)

        def fresh(i):
            state, ts = envs[i].reset(key, params.members[i])
            return strong(state), common(ts, i)

        blanks = [_zeros(lambda i=i: fresh(i)) for i in range(len(envs))]
        members = tuple(state for state, _ in blanks)

        def one(i):
            state, ts = fresh(i)
            return _replaced(members, i, state), ts

        return finish(index, _chain(index, [lambda i=i: one(i) for i in range(len(envs))], (members, blanks[0][1])))

    def step(key, state, action, params):
        def one(i):
            own, _ = resize(action, envs[i].spec.max_action)
            inner, ts = envs[i].step(key, state.members[i], own, params.members[i])
            return _replaced(state.members, i, strong(inner)), common(ts, i)

        blank = _zeros(lambda: one(0)[1])
        members = [lambda i=i: one(i) for i in range(len(envs))]
        return finish(state.env, _chain(state.env, members, (state.members, blank)))

    return Environment(
        name=f"mixture({','.join(env.name for env in envs)})",
        version="1:" + ",".join(env.version for env in envs),
        spec=spec,
        params=MixtureParams(weights, tuple(env.params for env in envs)),
        reset=reset,
        step=step,
        expert=_mixture_expert(envs, spec) if all(env.expert for env in envs) else None,
        anchor=_mixture_anchor(envs) if hashed else None,
        privileged=_mixture_privileged(envs) if any(env.privileged for env in envs) else None,
    )


def _mixture_expert(envs: tuple[Environment, ...], spec: EnvSpec) -> Callable[[Array, PyTree, PyTree], Text]:
    def expert(key, state, params):
        def one(i):
            act = cast(Callable[..., Text], envs[i].expert)
            return resize(act(key, state.members[i], params.members[i]), spec.max_action)[0]

        return _chain(state.env, [lambda i=i: one(i) for i in range(len(envs))], empty(spec.max_action))

    return expert


def _mixture_anchor(envs: tuple[Environment, ...]) -> Callable[[PyTree], Array]:
    def anchor(state):
        def one(i):
            act = envs[i].anchor
            return state.seen if act is None else jnp.asarray(act(state.members[i]), jnp.uint32)

        return _chain(state.env, [lambda i=i: one(i) for i in range(len(envs))], state.seen)

    return anchor


def _mixture_privileged(envs: tuple[Environment, ...]) -> Callable[[PyTree], Text]:
    def privileged(state):
        reads = [env.privileged for env in envs]
        shapes = [jax.eval_shape(r, s).data.shape[0] for r, s in zip(reads, state.members, strict=True) if r]
        capacity = max(shapes)

        def one(i):
            read = reads[i]
            return empty(capacity) if read is None else resize(read(state.members[i]), capacity)[0]

        return _chain(state.env, [lambda i=i: one(i) for i in range(len(envs))], empty(capacity))

    return privileged
