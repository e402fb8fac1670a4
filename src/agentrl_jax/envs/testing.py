"""``check_env``: the conformance suite for environments, yours included. Each rule is one sentence of the contract."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.base import Environment, canonical, canonical_params
from agentrl_jax.envs.wrappers import select, strong
from agentrl_jax.text import resize
from agentrl_jax.types import Array, PyTree, Text, TimeStep


class Report(NamedTuple):
    """Mean undiscounted return an episode (summed over roles) of the expert (None without one) and of random text."""

    expert: float | None
    random: float


class Play(NamedTuple):
    """One episode: ``first`` from reset, the rest stacked over turns ``[K]``; ``played`` is false after the end."""

    first: TimeStep | None
    ts: TimeStep
    played: Array
    written: Text | None
    anchor: Array | None
    privileged: Text | None


def check_env(env: Environment, key: Array | None = None, episodes: int = 8, params: PyTree | None = None) -> Report:
    """Checks that ``env`` keeps the contract of ``Environment``, on ``episodes`` tasks under every kind of text.

    Rules: the environment is hashable and its sizes are positive; ``reset`` and ``step`` trace under ``jit`` and
    ``vmap`` with traced parameters, also one set a row; they return the same shapes and dtypes; the state is a fixed
    point of ``step`` and holds no typed key; observations have the declared capacity and zeros beyond their length;
    info names are declared, its values and rewards finite; no episode is over at reset; ``terminated`` and
    ``truncated`` are never both set; results depend on the arguments alone (two traces agree) and not on the other
    rows of the batch; equal keys share the first observation; empty text, NULs, invalid UTF-8 and random bytes of any
    length never fail; the expert's text fits and earns at least what random text earns; the anchor is one uint32. An
    episode that is not over after ``max_turns`` is legal: the rollout cuts it. That an anchor ignores the step
    counter cannot be seen from outside.

    Raises:
      ValueError: ``env`` is no Environment or ``episodes < 1``.
      AssertionError: a rule is broken; the message names the environment and the rule.
    """
    if not isinstance(env, Environment):
        raise ValueError(f"check_env takes an Environment, got {type(env).__name__}")
    if episodes < 1:
        raise ValueError(f"check_env: episodes must be at least 1, got {episodes}")
    key = jax.random.key(0) if key is None else key
    _check_static(env)
    params = canonical_params(env.params if params is None else params)
    _check_shapes(env, key, params)
    keys = jax.random.split(key, episodes)
    texts = _texts(env, np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist()), episodes)
    kinds = texts.length.shape[0] // episodes
    return _check_play(env, keys, params, texts, kinds)


def _require(ok: Any, env: Environment, rule: str, found: Any = "") -> None:
    if not ok:
        raise AssertionError(f"environment {env.name!r}: {rule}" + (f"; found {found}" if found != "" else ""))


def _check_static(env: Environment) -> None:
    try:
        hash(env)
    except TypeError as error:
        raise AssertionError(f"environment {env.name!r}: must be hashable (static): {error}") from error
    spec = env.spec
    sizes = {name: getattr(spec, name) for name in ("max_observation", "max_action", "max_turns", "roles")}
    bad = {name: n for name, n in sizes.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1}
    _require(not bad, env, "sizes of spec must be positive Python ints", bad)
    _require(spec.cut_action in ("deliver", "end"), env, "spec.cut_action must be 'deliver' or 'end'", spec.cut_action)
    _require(len(dict(spec.info)) == len(spec.info), env, "spec.info must not repeat a name", spec.info)
    for name, dtype in spec.info:
        _require(dtype in ("float32", "int32", "uint32", "bool"), env, f"dtype of info {name!r}", dtype)
    for leaf in jax.tree.leaves(env.params):
        scalar = isinstance(leaf, (bool, int, float, np.generic))
        _require(scalar, env, "default params must be Python or NumPy scalars", type(leaf).__name__)


def _avals(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)


def _traced(env: Environment, what: str, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return jax.eval_shape(fn, *args)
    except jax.errors.JAXTypeError as error:
        rule = f"{what} must trace: no Python if, int() or shape from the state, the action or params"
        raise AssertionError(f"environment {env.name!r}: {rule}: {error}") from error


def _check_shapes(env: Environment, key: Array, params: PyTree) -> None:
    spec = env.spec
    state, first = _traced(env, "reset", env.reset, key, params)
    _check_timestep(env, "reset", first)
    dtypes = [str(getattr(leaf, "dtype", "")) for leaf in jax.tree.leaves(state)]
    _require(not any(d.startswith("key<") for d in dtypes), env, "state must hold no random key", dtypes)
    action = Text(jax.ShapeDtypeStruct((spec.max_action,), jnp.uint8), jax.ShapeDtypeStruct((), jnp.int32))  # pyright: ignore
    after, ts = _traced(env, "step", env.step, key, state, action, params)
    _check_timestep(env, "step", ts)
    rule = "step must return the state and inputs with the structure, shapes and dtypes that reset gives them"
    same = _avals((state, first.inputs)), _avals((after, ts.inputs))
    _require(same[0] == same[1], env, rule, f"{same[0]} from reset, {same[1]} from step")
    if env.expert:
        _check_text(env, "expert", _traced(env, "expert", env.expert, key, state, params), spec.max_action, exact=False)
    if env.privileged:
        _check_text(env, "privileged", _traced(env, "privileged", env.privileged, state), None)
    if env.anchor:
        anchor = _avals(_traced(env, "anchor", env.anchor, state))
        _require(anchor == "uint32[]", env, "anchor must be one uint32", anchor)


def _check_text(env: Environment, what: str, text: Any, capacity: int | None, *, exact: bool = True) -> None:
    _require(isinstance(text, Text), env, f"{what} must be a Text", type(text).__name__)
    shapes = _avals(tuple(text))
    _require(len(text.data.shape) == 1 and shapes[0].startswith("uint8"), env, f"{what}.data must be uint8[C]", shapes)
    _require(shapes[1] == "int32[]", env, f"{what}.length must be int32[]", shapes)
    size = text.data.shape[0]
    fits = capacity is None or (size == capacity if exact else size <= capacity)
    _require(fits, env, f"{what} must have {'' if exact else 'at most '}the {capacity} bytes of its spec", size)


def _check_timestep(env: Environment, what: str, ts: Any) -> None:
    _require(isinstance(ts, TimeStep), env, f"{what} must return (state, TimeStep)", type(ts).__name__)
    _check_text(env, f"the observation of {what}", ts.observation, env.spec.max_observation)
    shapes = {name: list(jnp.shape(value)) for name, value in (ts.info or {}).items()}
    _require(not any(shapes.values()), env, f"info of {what} must be scalars", shapes)
    for flag in ("terminated", "truncated", "restart", "role"):
        _require(jnp.shape(getattr(ts, flag)) == (), env, f"{flag} of {what} must be a scalar")
    try:
        jax.eval_shape(lambda t: canonical(t, env.spec), ts)
    except ValueError as error:
        raise AssertionError(f"environment {env.name!r}: {what}: {error}") from error


def _texts(env: Environment, rng: np.random.Generator, episodes: int) -> Text:
    """Hostile text, ``[kinds * episodes, K]``: empty, NULs, invalid UTF-8, bytes of any length, full, and printable."""
    size, turns = env.spec.max_action, env.spec.max_turns
    shape = (episodes, turns, size)
    printable = np.frombuffer(b"0123456789 +-*/()answer calc\n", np.uint8)
    some = rng.integers(0, size + 1, shape[:2])
    kinds: list[tuple[Any, Any]] = [
        (np.zeros(shape), np.zeros(shape[:2])),
        (np.zeros(shape), np.full(shape[:2], size)),
        (rng.choice([0x80, 0xC3, 0xFE, 0xFF], shape), np.full(shape[:2], size)),
        (rng.integers(0, 256, shape), some),
        (rng.integers(0, 256, shape), np.full(shape[:2], size)),
        (rng.choice(printable, shape), some),
    ]
    data = np.concatenate([d for d, _ in kinds]).astype(np.uint8)
    length = np.concatenate([n for _, n in kinds]).astype(np.int32)
    return Text(data * (np.arange(size) < length[..., None]), length)  # pyright: ignore


def _episode(env: Environment, key: Array, params: PyTree, texts: Text, teach: Array) -> Play:
    """Plays ``texts [K]``, or the expert where ``teach`` holds; a finished episode stays as it is."""
    spec = env.spec
    state, first = env.reset(key, params)

    def turn(carry, x):
        state, over = carry
        k, action = x
        act_key, step_key = jax.random.split(jax.random.fold_in(key, k))
        written = None
        if env.expert:
            written = env.expert(act_key, state, params)
            action = select(teach, resize(written, spec.max_action)[0], action)
        anchor = env.anchor(state) if env.anchor else None
        read = env.privileged(state) if env.privileged else None
        new, ts = env.step(step_key, state, action, params)
        ts = canonical(ts, spec)
        over_now = over | ts.terminated | ts.truncated
        return (select(over, state, strong(new)), over_now), Play(None, ts, ~over, written, anchor, read)

    carry = (strong(state), jnp.bool_(False))
    _, out = jax.lax.scan(turn, carry, (jnp.arange(spec.max_turns), texts))
    return out._replace(first=canonical(first, spec))


def _check_play(env: Environment, keys: Array, params: PyTree, texts: Text, kinds: int) -> Report:
    episodes = keys.shape[0]
    if env.expert:
        texts = jax.tree.map(lambda x: jnp.concatenate([x, x[:episodes]]), texts)
        kinds += 1
    rows = kinds * episodes
    teach = jnp.arange(rows) >= (rows - episodes if env.expert else rows)
    every = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), params)
    args = (jnp.tile(keys, kinds), every, texts, teach)
    _check_trace(env, jax.tree.map(lambda x: x[0], args))
    # One program for everything, hardly optimised: compiling is nearly all the cost of a check.
    program = jax.jit(jax.vmap(lambda *a: _episode(env, *a)), compiler_options={"xla_backend_optimization_level": 0})
    batch = jax.device_get(program(*args))
    _check_first(env, cast(TimeStep, batch.first), kinds, episodes)
    _check_turns(env, batch)
    for row in sorted({rows // 2, rows - 1}):
        alone = program(*jax.tree.map(lambda x, row=row: jnp.broadcast_to(x[row], x.shape), args))
        _check_equal(env, _pick(jax.device_get(alone), 0), _pick(batch, row))
    return _report(env, batch, teach)


def _pick(play: Play, row: int) -> Play:
    return jax.tree.map(lambda x: x[row], play)


def _check_trace(env: Environment, args: tuple[Any, ...]) -> None:
    """Two traces must be the same program: NumPy's random numbers, or a clock, would show as other constants."""
    traces = [jax.make_jaxpr(lambda *a: _episode(env, *a))(*args) for _ in range(2)]
    texts = [re.sub(r"0x[0-9a-f]+", "", str(trace)) for trace in traces]
    consts = zip(*(trace.consts for trace in traces), strict=False)
    same = texts[0] == texts[1] and all(np.array_equal(a, b) for a, b in consts)
    _require(same, env, "two traces must give the same program: all randomness comes from the key")


def _check_equal(env: Environment, alone: Play, row: Play) -> None:
    rule = "an episode must not depend on the other rows of the batch (a loop's body must leave finished rows alone)"
    flat = zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(row), strict=True)
    for (path, a), b in flat:
        same = np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        _require(same, env, rule, f"different {jax.tree_util.keystr(path)}")


def _check_bytes(env: Environment, what: str, text: Text) -> None:
    data, length = np.asarray(text.data), np.asarray(text.length)
    size = data.shape[-1]
    _require(np.all((length >= 0) & (length <= size)), env, f"length of {what} must be in [0, {size}]", length.max())
    clean = np.where(np.arange(size) < length[..., None], 0, data)
    _require(not clean.any(), env, f"{what} must be zero at and beyond its length")


def _check_first(env: Environment, first: TimeStep, kinds: int, episodes: int) -> None:
    _check_bytes(env, "the first observation", first.observation)
    for flag in ("terminated", "truncated", "restart"):
        _require(not np.any(getattr(first, flag)), env, f"reset must not set {flag}")
    data = np.asarray(first.observation.data).reshape(kinds, episodes, -1)
    _require((data == data[:1]).all(), env, "episodes with the same reset key must share the first observation")


def _check_turns(env: Environment, play: Play) -> None:
    ts, played = play.ts, np.asarray(play.played)
    _check_bytes(env, "an observation", ts.observation)
    if play.written is not None:
        _check_bytes(env, "the expert's text", play.written)
    if play.privileged is not None:
        _check_bytes(env, "the privileged text", play.privileged)
    reward = np.asarray(ts.reward)
    _require(np.isfinite(reward[played]).all(), env, "rewards must be finite", reward[played].min())
    for name, value in (ts.info or {}).items():
        _require(np.isfinite(np.asarray(value)[played]).all(), env, f"info {name!r} must be finite")
    both = np.asarray(ts.terminated) & np.asarray(ts.truncated) & played
    _require(not both.any(), env, "terminated and truncated must not both be set")
    role = np.asarray(ts.role)[played]
    _require(((role >= 0) & (role < env.spec.roles)).all(), env, f"role must be in [0, {env.spec.roles})", role.max())


def _report(env: Environment, play: Play, teach: Array) -> Report:
    reward = np.asarray(play.ts.reward)
    played = np.asarray(play.played).reshape(play.played.shape + (1,) * (reward.ndim - 2))
    returns = (reward * played).reshape(reward.shape[0], -1).sum(1)
    random = float(returns[~np.asarray(teach)].mean())
    if env.expert is None:
        return Report(None, random)
    expert = float(returns[np.asarray(teach)].mean())
    rule = "the expert must earn at least what random text earns"
    _require(expert >= random - 1e-6, env, rule, f"{expert:.4g} against {random:.4g}")
    return Report(expert, random)
