"""Trains a pair of the grid: the same cold start for all, a budget of tokens, several seeds, held-out evaluations."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench_grid
import jax
import jax.numpy as jnp
import numpy as np
from bench_grid import Arena, Options, Pair

from agentrl_jax import algorithms, checkpoint, control, scoring, train
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.envs.base import Environment, canonical_params
from agentrl_jax.evaluate import make_evaluate
from agentrl_jax.intervals import pass_at_k
from agentrl_jax.manifest import CheckpointError
from agentrl_jax.parallel import over_seeds
from agentrl_jax.train import TrainConfig, TrainState
from agentrl_jax.types import Array, PyTree
from agentrl_jax.update import UpdateConfig

BUFFER = 16
"""Steps of a call: longer runs call again."""
SOLVED = 0.999
FOREVER = 2**31 - 1


class Ground(NamedTuple):
    """What all pairs of an environment share: both sides of its tasks, where they begin, and how it is judged.

    ``start`` is the evaluation of the weights ``params`` they begin from, ``evaluate(params [L, ...], env_params)`` the
    same for weights of several runs.
    """

    env: Environment
    test: Environment
    params: PyTree
    start: dict[str, Any]
    evaluate: Callable[[PyTree, PyTree], list[dict[str, Any]]]


class Lanes:
    """``f(x)`` over a leading axis of runs: one after the other, at once, or an equal share of them a device.

    ``compile`` is called by the first use; ``seconds`` counts what it took.
    """

    def __init__(self, f: Callable[[Any], Any], how: str, lanes: int) -> None:
        """The largest number of devices that divides the lanes is used."""
        devices = max(d for d in range(1, min(lanes, jax.local_device_count()) + 1) if lanes % d == 0)
        self._split = (devices, lanes // devices) if how == "pmap" else None
        self._f = over_seeds((lambda xs: jax.lax.map(f, xs)) if how == "pmap" else f, how)
        self._program: Callable[[Any], Any] | None = None
        self.seconds = 0.0

    def __call__(self, x: Any) -> Any:
        """The results, with the same leading axis."""
        if self._split:
            x = jax.tree.map(lambda leaf: leaf.reshape(*self._split, *leaf.shape[1:]), x)
        if self._program is None:
            clock = time.monotonic()
            self._program = self._f.lower(x).compile()
            self.seconds = time.monotonic() - clock
        out = self._program(x)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out) if self._split else out


def make_advance(step: train.Step, limit: int) -> Callable[[tuple], tuple]:
    """``(state, used, target) -> (state, used, rows {name: [BUFFER]}, count)``: steps until ``target`` tokens.

    Tokens are those of the trajectories, read and written, and ``extra_tokens``, which an algorithm threw away. The
    step that reaches the target is made; no more than ``limit`` steps in all, and ``BUFFER`` at once.
    """

    def one(state: TrainState, used: Array) -> tuple[TrainState, Array, dict[str, Array]]:
        state, found = step(state)
        spent = sum(found[name][0] for name in ("tokens", "extra_tokens") if name in found)
        used = used + jnp.round(spent).astype(jnp.int32)
        return state, used, {**metrics_lib.finalize(found), "used": used.astype(jnp.float32)}

    def advance(lane: tuple[TrainState, Array, Array]) -> tuple[TrainState, Array, dict[str, Array], Array]:
        state, used, target = lane
        shapes = jax.eval_shape(one, state, used)[2]
        rows = jax.tree.map(lambda x: jnp.zeros((BUFFER, *x.shape), x.dtype), shapes)

        def needs(carry: tuple) -> Array:
            state, used, _, count = carry
            return (used < target) & (count < BUFFER) & (state.step < limit)

        def body(carry: tuple) -> tuple:
            more, (state, used, rows, count) = needs(carry), carry
            state, used, found = one(state, used)
            rows = jax.tree.map(lambda row, x: row.at[count].set(x), rows, found)
            return jax.tree.map(lambda new, old: jnp.where(more, new, old), (state, used, rows, count + 1), carry)

        return control.while_any(needs, body, (state, used, rows, jnp.int32(0)))

    return advance


def run_to(advance: Lanes, states: PyTree, used: Array, target: int, limit: int) -> tuple[PyTree, Array, list[dict]]:
    """Every run until it has used ``target`` tokens: ``(states, used, rows of each run)``."""
    rows: list[dict[str, list[float]]] = [{} for _ in range(len(used))]
    while True:
        states, used, found, count = advance((states, used, jnp.full(used.shape, target, jnp.int32)))
        found, count, now, step = jax.device_get((found, count, used, states.step))
        for lane, row in enumerate(rows):
            for name, values in found.items():
                row.setdefault(name, []).extend(float(value) for value in values[lane][: count[lane]])
        if np.all((now >= target) | (step >= limit)):
            return states, used, rows


def make_judge(arena: Arena, test: Environment, options: Options) -> Callable[[tuple], dict[str, Array]]:
    """``(params, start params, env_params) -> numbers`` of the held-out tasks: the same tasks and keys at every call.

    Greedy success, successes of the sampled tries by task, reward, length and turns of the sampled tries, and over
    their tokens the entropy and ``mean(log pi - log pi_start)``, the divergence from the weights that all began from.
    """
    tries = 1 + options.eval_samples
    play = make_evaluate(
        arena.policy, arena.codec, test, problems=options.eval_problems, samples=options.eval_samples,
        max_tokens=arena.max_tokens, segments=arena.segments,
        slots=min(options.slots or options.eval_problems * tries, options.eval_problems * tries),
    )  # fmt: skip
    view, allowed = scoring.View(), arena.codec.sampleable

    def judge(lane: tuple[PyTree, PyTree, PyTree]) -> dict[str, Array]:
        params, start, env_params = lane
        key = jax.random.fold_in(jax.random.key(options.seed), FOREVER)
        found = play(params, key, env_params, options.temperature)
        traj = found.trajectory
        # Where a try was greedy its distribution has no entropy.
        sampled = traj.mask & (traj.temperature > 0)[:, None]
        batch = scoring.as_batch(traj._replace(temperature=jnp.full_like(traj.temperature, options.temperature)))
        score = lambda p: scoring.score(arena.policy, p, view, batch, allowed=jnp.asarray(allowed))  # noqa: E731
        mine, first = score(params), score(start)
        mean = lambda x: jnp.sum(jnp.where(sampled, x, 0.0)) / jnp.maximum(jnp.sum(sampled), 1)  # noqa: E731
        rest = {name: getattr(found, name)[:, 1:].mean() for name in ("reward", "length", "written", "turns")}
        return rest | {
            "greedy": jnp.mean(found.success[:, 0] >= SOLVED),
            "solved": jnp.sum(found.success[:, 1:] >= SOLVED, axis=1),
            "entropy": mean(mine.entropy), "kl_start": mean(mine.logp - first.logp),
        }  # fmt: skip

    return judge


def spelled(found: dict[str, Any], samples: int) -> dict[str, Any]:
    """The numbers of one evaluation, pass@k in place of the successes: ``k`` = 1, 2, 4, ... and the samples."""
    solved = np.asarray(found["solved"])
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i <= samples)})
    rates = {str(k): float(pass_at_k(samples, solved, k).mean()) for k in ks}
    return {name: float(x) for name, x in found.items() if name != "solved"} | {"pass": rates}


def prepare(arena: Arena, directory: Path, options: Options, lanes: int, say: Callable[[str], None]) -> Ground:
    """The cold start, or its checkpoint, and its evaluation."""
    env, test, note = bench_grid.split(arena)
    if note:
        say(f"note: {note}")
    params = cold_start(arena, env, directory / "cold_start", options, say)
    program = Lanes(make_judge(arena, test, options), options.how, lanes)
    many = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *jnp.shape(x))), tree)  # noqa: E731

    def evaluate(runs: PyTree, env_params: PyTree) -> list[dict[str, Any]]:
        found = jax.device_get(program((runs, many(params), env_params)))
        return [spelled({name: x[lane] for name, x in found.items()}, options.eval_samples) for lane in range(lanes)]

    start = evaluate(many(params), many(canonical_params(arena.env.params)))[0]
    return Ground(env, test, params, start, evaluate)


def cold_start(arena: Arena, env: Environment, directory: Path, options: Options, say: Callable[[str], None]) -> PyTree:
    """Weights after the supervised phase, kept on disk under a hash of all they depend on; random ones without it."""
    key = jax.random.key(options.seed)
    if not arena.supervised_steps:
        return jax.jit(arena.policy.init)(key)
    settings = bench_grid.cold_start_settings(arena, options)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
    folder, shapes = directory / digest, jax.eval_shape(arena.policy.init, key)
    if folder.is_dir():
        try:
            return checkpoint.restore(folder, shapes).state
        except CheckpointError as error:
            say(f"warning: the cold start in {folder} cannot be used and is made again: {error}")
    clock = time.monotonic()
    params, loss = _imitate(arena, env, options, key)
    with checkpoint.Checkpoints(folder, keep_last=1) as checkpoints:
        checkpoints.save(arena.supervised_steps, params, {"settings": settings}, wait=True)
    say(
        f"cold start of {arena.label}: {arena.supervised_steps} steps, {loss:.3f} nats per token at the end, "
        f"{time.monotonic() - clock:.0f} s"
    )
    return params


def _imitate(arena: Arena, env: Environment, options: Options, key: Array) -> tuple[PyTree, float]:
    episodes, steps = options.supervised_episodes, arena.supervised_steps
    algorithm = algorithms.make("behavior_cloning")
    config = TrainConfig(
        episodes, 1, min(options.slots, episodes) or None, arena.max_tokens, arena.segments,
        UpdateConfig(schedule="cosine"),
    )  # fmt: skip
    numbers = {"learning_rate": options.supervised_learning_rate, "warmup": options.supervised_warmup, "decay": steps}
    parts = arena.policy, arena.codec, env, algorithm, config
    state = jax.jit(train.make_init(*parts))(key, train.make_hyper(algorithm, env, **numbers))
    advance = Lanes(make_advance(train.make_step(*parts), steps), "map", 1)
    states, _, rows = run_to(advance, jax.tree.map(lambda x: x[None], state), jnp.zeros(1, jnp.int32), FOREVER, steps)
    return jax.tree.map(lambda x: x[0], states.params["policy"]), rows[0]["loss"][-1]


def run_pair(pair: Pair, ground: Ground, options: Options) -> dict[str, Any]:
    """Trains every point and seed of a pair to its budget: ``{"groups": [...], "seconds": {...}}``.

    A group is a point: its label, numbers and ``seeds``, of each the metrics of every step (``steps``, with ``used``,
    the tokens so far) and its evaluations (``evals``, the start's first).
    """
    method, arena, clock = pair.method, pair.arena, time.monotonic()
    parts = arena.policy, arena.codec, ground.env, method.algorithm, pair.config
    hypers = [bench_grid.hyper(method, arena, point, options) for point in pair.points for _ in range(options.seeds)]
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(options.seed)))(
        jnp.tile(jnp.arange(options.seeds), len(pair.points))
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *hypers)
    states = jax.jit(jax.vmap(train.make_init(*parts), (0, 0, None)))(keys, stacked, ground.params)
    advance = Lanes(make_advance(train.make_step(*parts), options.max_steps), options.how, len(hypers))
    used = jnp.zeros(len(hypers), jnp.int32)
    lanes = [{"steps": {}, "evals": [{"used": 0, "step": 0, **ground.start}]} for _ in hypers]
    judging = 0.0
    for i in range(options.evals):
        states, used, rows = run_to(advance, states, used, arena.budget * (i + 1) // options.evals, options.max_steps)
        begun = time.monotonic()
        found = ground.evaluate(states.params["policy"], states.hyper.env_params)
        judging += time.monotonic() - begun
        _note(lanes, rows, found, jax.device_get((used, states.step)))
    seconds = {"compile": advance.seconds, "evaluate": judging}
    seconds["train"] = time.monotonic() - clock - sum(seconds.values())
    groups = [
        {**point._asdict(), "seeds": lanes[i * options.seeds : (i + 1) * options.seeds]}
        for i, point in enumerate(pair.points)
    ]
    return {"groups": groups, "seconds": seconds}


def _note(lanes: list[dict], rows: list[dict], found: list[dict], counts: tuple[np.ndarray, np.ndarray]) -> None:
    for lane, new, numbers, used, step in zip(lanes, rows, found, *counts, strict=True):
        for name, values in new.items():
            lane["steps"].setdefault(name, []).extend(values)
        wrong = sorted(name for name, value in numbers.items() if name != "pass" and not np.isfinite(value))
        if wrong:
            raise FloatingPointError(f"{wrong[0]} of the evaluation after step {step} is {numbers[wrong[0]]}")
        lane["evals"].append({"used": int(used), "step": int(step), **numbers})
