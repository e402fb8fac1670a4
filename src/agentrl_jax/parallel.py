"""The only file that knows devices: data parallel, FSDP, tensor rules, seeds over devices, several hosts.

The update runs in the global view: ``jit`` over a mesh, parameters placed by rules, and algorithm code that names no
axis. The rollout runs under ``shard_map``, manual over every axis: each device plays its own episodes to their end, and
no collective stands inside the loop. Tokens depend on neither, since randomness belongs to the episode.

::

    mesh = make_mesh(fsdp=4)
    init = make_init(policy, codec, env, algorithm, config)
    sharding = state_sharding(mesh, jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=sharding)(key)          # or shard_state(state, sharding)
    step = make_step(policy, codec, env, algorithm, config, rollout=sharded_rollout(mesh))
    step = jit_step(step, mesh, sharding)

Several hosts run this same program, with ``initialize`` before it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agentrl_jax import train, update
from agentrl_jax.algorithm import Algorithm, TrainState
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment
from agentrl_jax.game import Sizes, assign_tasks, check, check_numbers, check_start
from agentrl_jax.policy import Policy
from agentrl_jax.rollout import rollout
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Start, Trajectory

AXES = ("data", "fsdp", "tensor")
"""Axes of a mesh: replicas; parameters in pieces, gathered where they are used; matrices in pieces that stay apart."""

BATCH_AXES = ("data", "fsdp")
"""Axes over which the rows of the update are split; along ``tensor`` devices share rows and split matrices."""

Rules: TypeAlias = Sequence[tuple[str, PartitionSpec]]
"""``(regular expression searched in a parameter's path, spec)``; the first that matches counts."""

TENSOR_RULES: Rules = (
    (r"(^|/)(embedding|head)$", PartitionSpec("tensor", None)),
    (r"attention/qkv/kernel$", PartitionSpec(None, "tensor")),
    (r"attention/out/kernel$", PartitionSpec("tensor", None)),
    (r"feed_forward/gate_up/kernel$", PartitionSpec(None, "tensor")),
    (r"feed_forward/down/kernel$", PartitionSpec("tensor", None)),
)
"""The transformer's matrices: vocabulary, attention heads and feed-forward width over ``tensor`` (Shoeybi et al., 2019,
arXiv:1909.08053)."""


def make_mesh(*, data: int | None = None, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A ``data x fsdp x tensor`` mesh over ``devices`` (default: all, of every host), with axes of type ``Auto``.

    ``data=None`` takes what the other axes leave.

    Raises:
      ValueError: a size below 1, or a product other than the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    for name, size in (("data", data), ("fsdp", fsdp), ("tensor", tensor)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    sizes = (max(1, len(devices) // (fsdp * tensor)) if data is None else data, fsdp, tensor)
    if math.prod(sizes) != len(devices):
        shape = " x ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(f"{shape} needs {math.prod(sizes)} devices, and there are {len(devices)}")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def param_specs(mesh: Mesh, params: PyTree, rules: Rules = TENSOR_RULES) -> PyTree:
    """A ``PartitionSpec`` a leaf: the rule that matches its path, then ``fsdp`` on its largest axis still whole.

    Where the mesh axis does not divide a size, that axis stays whole. Only matrices are split over ``fsdp``: a vector
    costs less than its messages. Paths read ``policy/blocks_0/attention/qkv/kernel``.

    Raises:
      ValueError: a rule with more axes than the leaf has, or with an unknown mesh axis; ``fsdp`` or ``tensor`` larger
        than 1 where it divides no parameter.
    """
    specs = jax.tree.map_with_path(lambda path, leaf: _spec(mesh, _name(path), leaf.shape, rules), params)
    used = {axis for spec in jax.tree.leaves(specs, is_leaf=_is_spec) for part in spec for axis in _names(part)}
    for axis in ("fsdp", "tensor"):
        if mesh.shape.get(axis, 1) > 1 and axis not in used:
            raise ValueError(f"{axis}={mesh.shape[axis]} divides no axis of any parameter that the rules split over it")
    return specs


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _spec(mesh: Mesh, name: str, shape: tuple[int, ...], rules: Rules) -> PartitionSpec:
    wanted = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    if len(wanted) > len(shape):
        raise ValueError(f"the rule for {name} has {len(wanted)} axes, {wanted}, and its shape is {shape}")
    parts: list[Any] = [*wanted, *[None] * (len(shape) - len(wanted))]
    for i, part in enumerate(parts):
        unknown = set(_names(part)) - set(mesh.axis_names)
        if unknown:
            raise ValueError(f"the rule for {name} names {sorted(unknown)}; the mesh has {mesh.axis_names}")
        pieces = math.prod(mesh.shape[axis] for axis in _names(part))
        if pieces == 1 or shape[i] % pieces:
            parts[i] = None
    pieces = mesh.shape.get("fsdp", 1)
    free = [i for i, part in enumerate(parts) if part is None and shape[i] % pieces == 0]
    if pieces > 1 and len(shape) > 1 and free and not any("fsdp" in _names(part) for part in parts):
        parts[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*parts)


def state_sharding(mesh: Mesh, state: TrainState, rules: Rules = TENSOR_RULES) -> TrainState:
    """A ``NamedSharding`` for every leaf of a ``TrainState``, concrete or from ``jax.eval_shape``.

    Parameters follow ``param_specs``; an optimiser's leaf whose path ends in a parameter's path, and has its shape,
    lies where that parameter lies; everything else is replicated. Errors are those of ``param_specs``.
    """
    specs = param_specs(mesh, state.params, rules)
    flat = jax.tree_util.tree_leaves_with_path(state.params)
    placed = dict(zip((p for p, _ in flat), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True))
    shapes = {path: leaf.shape for path, leaf in flat}

    def mirrored(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        ends = (path[i:] for i in range(len(path)))
        return next((placed[end] for end in ends if shapes.get(end) == leaf.shape), PartitionSpec())

    whole = jax.tree.map(lambda _: PartitionSpec(), state)
    whole = whole._replace(params=specs, opt_state=jax.tree.map_with_path(mirrored, state.opt_state))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), whole, is_leaf=_is_spec)


def shard_state(state: TrainState, sharding: TrainState) -> TrainState:
    """A copy of a state (the same on every host) that lies where ``sharding`` says; donating it spares the original."""
    return jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=sharding)(state)


def jit_step(step: train.Step, mesh: Mesh, sharding: TrainState, **options: Any) -> train.Step:
    """``step`` as one program over the mesh: the state stays where ``sharding`` says and is donated.

    Metrics are replicated; ``options`` go to ``jax.jit``. A state that is passed must lie so already (``shard_state``).
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, in_shardings=(sharding,), out_shardings=(sharding, everywhere), donate_argnums=0, **options)


def sharded_rollout(
    mesh: Mesh, *, rollout_mode: str = "split", dtype: jax.typing.DTypeLike | None = None
) -> Callable[..., Trajectory]:
    """A drop-in for ``rollout``: each device plays ``episodes / devices`` episodes in ``slots / devices`` slots.

    Tokens equal those of ``rollout``; rows come back split over ``BATCH_AXES``, whole episodes together.

    Args:
      mesh: of ``make_mesh``.
      rollout_mode: ``"split"``: parameters are gathered once, whole, on every device, and devices then run alone, each
        as long as its own episodes last. ``"lockstep"``: for parameters that do not fit on one device. ``rollout``
        itself runs in the global view: all devices take every iteration together, parameters stay in pieces, and
        messages pass at every token. Sizes need not be multiples of the devices.
      dtype: floating-point parameters are cast to it before they are gathered (``"split"``): the policy's own
        ``dtype`` halves the message for bfloat16. None: as they are.

    Raises:
      ValueError: another ``rollout_mode``; when called, episodes or slots that are not a multiple of the devices.
    """
    if rollout_mode == "lockstep":
        return functools.partial(_lockstep_rollout, mesh)
    if rollout_mode != "split":
        raise ValueError(f"rollout_mode must be 'split' or 'lockstep', got {rollout_mode!r}")
    return functools.partial(_split_rollout, mesh, dtype)


def _rows(mesh: Mesh, tree: PyTree) -> PyTree:
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec(axes)))


def _lockstep_rollout(mesh: Mesh, policy: Policy | None, *args: Any, **options: Any) -> Trajectory:
    if policy is not None:
        # The cache is by far the largest array of the loop; what is computed from it follows its placement.
        init_cache = policy.init_cache
        policy = policy._replace(init_cache=lambda batch, capacity: _rows(mesh, init_cache(batch, capacity)))
    return _rows(mesh, rollout(policy, *args, **options))


def _split_rollout(
    mesh: Mesh,
    dtype: jax.typing.DTypeLike | None,
    policy: Policy | None,
    codec: Codec,
    env: Environment,
    params: PyTree,
    key: Array,
    *,
    env_params: PyTree | None = None,
    version: Array | int = 0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    **options: Any,
) -> Trajectory:
    start, ids, options = _divide(mesh.size, policy, codec, env, key, **options)
    traced = {"env_params": env_params, "version": version, "top_k": top_k, "top_p": top_p}

    def play(params: PyTree, key: Array, start: Start, ids: Array, traced: dict[str, Any]) -> Trajectory:
        return rollout(policy, codec, env, params, key, start=start, episode_ids=ids, **traced, **options)

    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    rows, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    # Manual over every axis: were one left to the compiler, it could put a collective into a loop that devices leave
    # at different times, and they would wait for each other for ever.
    play = jax.shard_map(
        play, mesh=mesh, in_specs=(whole, whole, rows, rows, whole), out_specs=rows, check_vma=False
    )  # fmt: skip
    return _rows(mesh, _renumber(play(params, key, start, ids, traced), options["segments"]))


def _divide(
    parts: int,
    policy: Policy | None,
    codec: Codec,
    env: Environment,
    key: Array,
    *,
    episodes: int,
    slots: int,
    max_tokens: int,
    group_size: int = 1,
    temperature: Array | float = 1.0,
    start: Start | None = None,
    segments: int = 1,
    episode_ids: Array | None = None,
    **schedule: Any,
) -> tuple[Start, Array, dict[str, Any]]:
    """``(start, episode ids, options of a part)``: all that depends on the whole batch, decided before it is split."""
    start = start or Start()
    check(policy, codec, env, Sizes(episodes, slots, max_tokens, group_size, segments), start)
    check_numbers(temperature, None, None)
    check_start(start, episodes if episode_ids is None else None)
    for name, size in (("episodes", episodes), ("slots", slots)):
        if size % parts:
            raise ValueError(f"{name} ({size}) must be a multiple of the number of devices ({parts})")
    ids = jnp.arange(episodes, dtype=jnp.int32) if episode_ids is None else jnp.asarray(episode_ids, jnp.int32)
    task, group = assign_tasks(key, start, ids, group_size)
    heat = temperature if start.temperature is None else start.temperature
    start = start._replace(task=task, group=group, temperature=jnp.broadcast_to(heat, (episodes,)))
    options = {"episodes": episodes // parts, "slots": slots // parts, "max_tokens": max_tokens, "segments": segments}
    return start, ids, options | schedule


def _renumber(traj: Trajectory, segments: int) -> Trajectory:
    """Rows of all parts, end to end, with episodes counted over the whole batch."""
    return traj._replace(episode=jnp.arange(traj.length.shape[0], dtype=jnp.int32) // segments)


def pmap_data_parallel(
    policy: Policy,
    codec: Codec,
    env: Environment,
    algorithm: Algorithm,
    config: train.TrainConfig,
    *,
    devices: Sequence[Any] | None = None,
) -> train.Step:
    """``make_step`` by ``jax.pmap``, the short way to data parallelism: ``step(state) -> (state, metrics)``, compiled.

    Every device plays its share of the episodes; all of them then see the whole batch, so statistics and denominators
    are global. Each differentiates its share of a weighed minibatch, and gradients, losses and metric sums and counts
    are added: never a mean of means, which is wrong with ragged masks. Scoring before the first update is done
    by all devices alike; ``jit_step`` splits it too, and parameters besides.

    Raises:
      ValueError: episodes, slots or the units of a minibatch are not a multiple of the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    structure, parts = config.update, len(devices)
    units = config.episodes // (config.group_size if "pairs" in algorithm.needs else 1)
    pieces = structure.minibatches * structure.microbatches * parts
    if units % pieces:
        raise ValueError(
            f"{units} units do not split into {structure.minibatches} minibatches of {structure.microbatches} "
            f"micro-batches on {parts} devices: they must be a multiple of {pieces}"
        )
    step = train.make_step(
        policy, codec, env, algorithm, config,
        rollout=functools.partial(_pmap_rollout, parts), differentiate=functools.partial(_pmap_gradient, parts),
    )  # fmt: skip
    spread = jax.pmap(lambda _, s: step(s), "data", in_axes=(0, None), out_axes=None, devices=devices)
    here = sum(device.process_index == jax.process_index() for device in devices)
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def run(state: TrainState) -> tuple[TrainState, Metrics]:
        # Where a state lies is part of the program: left where it comes from, the second step would compile again.
        # The zeros are there because pmap wants something to map over.
        return spread(np.zeros(here), jax.device_put(state, everywhere))

    return run


def _share(parts: int, tree: PyTree) -> PyTree:
    """This device's rows of every leaf."""
    index = jax.lax.axis_index("data")

    def one(x: Array) -> Array:
        size = x.shape[0] // parts
        return jax.lax.dynamic_slice_in_dim(x, index * size, size)

    return jax.tree.map(one, tree)


def _pmap_rollout(
    parts: int, policy: Policy | None, codec: Codec, env: Environment, params: PyTree, key: Array,
    *, env_params: PyTree | None = None, version: Array | int = 0, **options: Any,
) -> Trajectory:  # fmt: skip
    start, ids, options = _divide(parts, policy, codec, env, key, **options)
    start, ids = _share(parts, (start, ids))
    traj = rollout(
        policy, codec, env, params, key, start=start, episode_ids=ids, env_params=env_params, version=version, **options
    )
    traj = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), traj)
    return _renumber(traj, options["segments"])


def _pmap_gradient(
    parts: int, algorithm: Algorithm, score: update.ScoreFn, params: dict[str, PyTree], batch: Batch,
    hyper: dict[str, Array], **options: Any,
) -> tuple[PyTree, Array, Metrics]:  # fmt: skip
    grads, loss, metrics = update.gradient(algorithm, score, params, _share(parts, batch), hyper, **options)
    add = lambda x: jax.lax.psum(x, "data")  # noqa: E731
    over = lambda name: jax.lax.pmax if name.startswith("max_") else jax.lax.psum  # noqa: E731
    metrics = {name: (over(name)(total, "data"), add(count)) for name, (total, count) in metrics.items()}
    return add(grads), add(loss), metrics


def over_seeds(f: Callable, how: str = "map") -> Callable:
    """``f(key)``, compiled, over a leading axis of keys: ``map`` in turn, ``vmap`` at once, ``pmap`` one a device.

    On CPU ``vmap`` is a convenience, not a gain.

    Raises:
      ValueError: an unknown ``how``.
    """
    if how == "pmap":
        return jax.pmap(f)
    if how == "vmap":
        return jax.jit(jax.vmap(f))
    if how == "map":
        return jax.jit(lambda keys: jax.lax.map(f, keys))
    raise ValueError(f"how must be map, vmap or pmap, got {how!r}")


def initialize(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None, **options: Any
) -> None:
    """Joins this process to the others, before anything else touches JAX; then every host runs the same program.

    Args:
      coordinator: ``host:port`` of process 0. With a loopback host it listens there alone.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      **options: of ``jax.distributed.initialize``.

    Without arguments JAX asks the cluster (Slurm, TPU pods, Kubernetes). CPU devices talk through gloo.

    Raises:
      ValueError: only some of the three are given; a coordinator that is not ``host:port``; a number out of range.
      RuntimeError: this process has joined already, or JAX is in use.
    """
    given = (coordinator, num_processes, process_id)
    if any(x is not None for x in given) and any(x is None for x in given):
        raise ValueError(
            f"give coordinator, num_processes and process_id together, or none of them; got {coordinator!r}, "
            f"{num_processes} and {process_id}"
        )
    if coordinator is not None and num_processes is not None and process_id is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"coordinator must be 'host:port' with a port in [1, 65535], got {coordinator!r}")
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise ValueError(f"process_id must be in [0, num_processes = {num_processes}), got {process_id}")
        if host in ("localhost", "127.0.0.1", "[::1]"):
            options = {"coordinator_bind_address": coordinator} | options
    if jax.distributed.is_initialized():
        raise RuntimeError("this process has joined already: initialize must be called once")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes, process_id, **options)
