"""The environment contract: pure functions over byte strings, unbatched; ``vmap`` them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from agentrl_jax.types import Array, PyTree, Text, TimeStep


class EnvSpec(NamedTuple):
    """Static sizes of an environment.

    Attributes:
      max_observation: bytes of capacity of an observation.
      max_action: bytes of an action; a longer one is cut.
      max_turns: actions in an episode; the rollout truncates an episode that is not over by then.
      roles: seats.
      info: ``((name, dtype), ...)`` of ``TimeStep.info``, scalars; dtype is a NumPy name such as ``"float32"``.
        ``"success"`` (float32, 1 when the task was solved) is what evaluation reports, when it is there.
      cut_action: what happens to an action cut by its budget: ``"deliver"`` it to ``step`` as it stands, or
        ``"end"`` the episode as truncated without calling ``step``.
      members: names of the environments of a mixture, whose ``info["env"]`` is an index into them; else empty.
    """

    max_observation: int
    max_action: int
    max_turns: int
    roles: int = 1
    info: tuple[tuple[str, str], ...] = (("success", "float32"),)
    cut_action: str = "deliver"
    members: tuple[str, ...] = ()


class Environment(NamedTuple):
    """An environment as pure functions; hashable and static. Randomness is in the call, never in the state.

    Attributes:
      name: registry name.
      version: bumped whenever behaviour changes.
      spec: static sizes.
      params: default difficulty, a NamedTuple of Python or NumPy scalars; traced when it is used, so curricula
        and ``vmap`` need no recompilation.
      reset: ``(key, params) -> (state, TimeStep)``.
      step: ``(key, state, action: Text, params) -> (state, TimeStep)``.
      expert: ``(key, state, params) -> Text``, a scripted teacher's next action, or None.
      anchor: ``(state) -> uint32[]``, hash of what the agent sees before acting, without history or step
        counter; None: the observation's hash.
      privileged: ``(state) -> Text``, what a training-time critic may read, or None.
    """

    name: str
    version: str
    spec: EnvSpec
    params: PyTree
    reset: Callable[[Array, PyTree], tuple[PyTree, TimeStep]]
    step: Callable[[Array, PyTree, Text, PyTree], tuple[PyTree, TimeStep]]
    expert: Callable[[Array, PyTree, PyTree], Text] | None = None
    anchor: Callable[[PyTree], Array] | None = None
    privileged: Callable[[PyTree], Text] | None = None


def canonical(ts: TimeStep, spec: EnvSpec) -> TimeStep:
    """Gives every field its fixed strong dtype, so that ``reset`` and ``step`` agree; missing info is zero.

    Raises:
      ValueError: the environment reports an info name that ``spec.info`` does not declare.
    """
    info = ts.info or {}
    declared = dict(spec.info)
    unknown = sorted(set(info) - set(declared))
    if unknown:
        raise ValueError(f"TimeStep.info has {unknown}, but EnvSpec.info declares only {sorted(declared)}")
    shape = () if spec.roles == 1 else (spec.roles,)
    return TimeStep(
        observation=Text(jnp.asarray(ts.observation.data, jnp.uint8), jnp.asarray(ts.observation.length, jnp.int32)),
        reward=jnp.broadcast_to(jnp.asarray(ts.reward, jnp.float32), shape),
        terminated=jnp.asarray(ts.terminated, bool),
        truncated=jnp.asarray(ts.truncated, bool),
        restart=jnp.asarray(ts.restart, bool),
        role=jnp.asarray(ts.role, jnp.int32),
        inputs=ts.inputs,
        info={name: jnp.asarray(info.get(name, 0), dtype) for name, dtype in declared.items()},
    )


def canonical_params(params: PyTree, like: PyTree | None = None) -> PyTree:
    """Environment parameters as strong float32, int32 or bool arrays: the only traced form.

    Args:
      params: numbers, or arrays with further leading axes.
      like: an environment's own parameters, whose types they get, so that ``reward=2`` compiles nothing where the
        default is ``1.0``.

    Raises:
      ValueError: a fraction where ``like`` has a whole number or a switch.
    """
    params = jax.tree.map(_canonical, params)
    return params if like is None else jax.tree.map(_retype, params, jax.tree.map(_canonical, like))


def _canonical(x: ArrayLike) -> Array:
    array = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.float32)
    return array.astype(bool if jnp.issubdtype(array.dtype, jnp.bool_) else jnp.int32)


def _retype(x: Array, like: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != like.dtype:
        raise ValueError(f"an environment parameter must be {like.dtype}, as its default {like}, got {x.dtype}: {x}")
    return x.astype(like.dtype)


def played_member(steps: Mapping[str, Array], episodes: int) -> Array:
    """Member of a mixture that each episode played, from ``Trajectory.steps``: ``int32[episodes]``, -1 for one that
    was cut before its first action."""
    index = jnp.where(steps["played"], steps["env"], -1)
    return jnp.max(index.reshape(episodes, -1), axis=1)
