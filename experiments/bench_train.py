"""Trains a pair of the grid: the same cold start for all, a budget of tokens, several seeds, held-out evaluations."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import bench_grid
import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench_grid import Arena, Options, Pair

from agentrl_jax import algorithms, checkpoint, control, scoring, train
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Hyper
from agentrl_jax.envs.base import Environment, canonical_params
from agentrl_jax.evaluate import make_evaluate
from agentrl_jax.intervals import pass_at_k
from agentrl_jax.parallel import over_seeds
from agentrl_jax.train import TrainConfig, TrainState
from agentrl_jax.types import Array, PyTree
from agentrl_jax.update import UpdateConfig

BUFFER = 16
"""Steps of a call: longer runs call again."""
SOLVED = 0.999
FOREVER = 2**31 - 1
SOMETIMES = ("written_solved", "written_failed")
"""Numbers of an evaluation that have no value where no try was of that kind."""


class Lanes:
    """``f(x)`` over a leading axis of runs: one after the other, at once, or an equal share of them a device.

    It is compiled before its first use; ``seconds`` is what that took.
    """

    def __init__(self, f: Callable[[Any], Any], how: str, lanes: int) -> None:
        """The largest number of devices that divides the lanes is used."""
        devices = max(d for d in range(1, min(lanes, jax.local_device_count()) + 1) if lanes % d == 0)
        self._split = (devices, lanes // devices) if how == "pmap" else None
        self._f = over_seeds((lambda xs: jax.lax.map(f, xs)) if how == "pmap" else f, how)
        self._program: Callable[[Any], Any] | None = None
        self.lanes, self.seconds = lanes, 0.0

    def compile(self, one: Any) -> Lanes:
        """Compiles it for what has the shapes of ``one`` with the leading axis; returns itself."""
        lead, clock = self._split or (self.lanes,), time.monotonic()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), one)
        self._program = self._f.lower(like).compile()
        self.seconds = time.monotonic() - clock
        return self

    def __call__(self, x: Any) -> Any:
        """The results, with the same leading axis."""
        assert self._program is not None
        if self._split is None:
            return self._program(x)
        out = self._program(jax.tree.map(lambda leaf: leaf.reshape(*self._split, *leaf.shape[1:]), x))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)


class Programs(NamedTuple):
    """``init(keys, hypers, params)`` and the steps of several runs."""

    init: Callable[..., TrainState]
    advance: Lanes


class Ground(NamedTuple):
    """What all pairs of an environment share.

    ``params`` are the weights they begin from, ``start`` the evaluation of these; ``evaluate(params [L, ...],
    env_params)`` gives that of several runs; ``note`` says what tasks those are, where none are held out.
    """

    params: PyTree
    start: dict[str, Any]
    evaluate: Callable[[PyTree, PyTree], list[dict[str, Any]]]
    note: str


def make_advance(step: train.Step, limit: int) -> Callable[[tuple], tuple]:
    """``(state, used, target) -> (state, used, rows {name: [BUFFER]}, count)``: steps until ``target`` tokens.

    Tokens are those of the trajectories, read and written, and ``extra_tokens``, which an algorithm threw away. The
    step that reaches the target is made; no more than ``limit`` steps in all, and ``BUFFER`` at once.
    """

    @jax.jit  # Traced once for shapes and loop.
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

    Greedy success, successes of the sampled tries by task, reward, length and turns of the sampled tries, tokens
    written by those that solved and that failed (NaN where none did), and over their tokens the entropy and
    ``mean(log pi - log pi_start)``, the divergence from the weights that all began from.
    """
    tries = 1 + options.eval_samples
    play = make_evaluate(
        arena.policy, arena.codec, test, problems=arena.eval_problems, samples=options.eval_samples,
        max_tokens=arena.max_tokens, segments=arena.segments,
        slots=min(options.slots or arena.eval_problems * tries, arena.eval_problems * tries),
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
        solved, written = found.success[:, 1:] >= SOLVED, found.written[:, 1:]
        among = lambda tries: jnp.sum(jnp.where(tries, written, 0.0)) / jnp.sum(tries)  # noqa: E731
        rest = {name: getattr(found, name)[:, 1:].mean() for name in ("reward", "length", "written", "turns")}
        return rest | {
            "greedy": jnp.mean(found.success[:, 0] >= SOLVED),
            "solved": jnp.sum(solved, axis=1), "written_solved": among(solved), "written_failed": among(~solved),
            "entropy": mean(mine.entropy), "kl_start": mean(mine.logp - first.logp),
        }  # fmt: skip

    return judge


def spelled(found: dict[str, Any], samples: int) -> dict[str, Any]:
    """The numbers of one evaluation, pass@k in place of the successes: ``k`` = 1, 2, 4, ... and the samples.

    Raises:
      FloatingPointError: a number is not finite that always has a meaning.
    """
    found = {name: None if name in SOMETIMES and np.isnan(x) else x for name, x in found.items()}
    wrong = sorted(name for name, x in found.items() if x is not None and not np.all(np.isfinite(x)))
    if wrong:
        raise FloatingPointError(f"{wrong[0]} of an evaluation is {found[wrong[0]]}")
    solved = np.asarray(found["solved"])
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i <= samples)})
    rates = {str(k): float(pass_at_k(samples, solved, k).mean()) for k in ks}
    plain = {name: None if x is None else float(x) for name, x in found.items() if name != "solved"}
    return plain | {"pass": rates}


def ahead(
    jobs: dict[str, Future[Any]], pool: Executor, pairs: Sequence[Pair], directory: Path, options: Options
) -> None:
    """Begins to compile what the pairs need and ``jobs`` lacks, in that order, while others run: XLA leaves cores idle.

    Keys are those of the pairs, and ``cold`` and ``judge`` with the label of the environment. A compiled program holds
    thousands of memory maps, of which a process may have some 65,000: give it the next few pairs, not all.
    """
    for pair in pairs:
        arena, label = pair.arena, pair.arena.label
        if f"judge {label}" not in jobs:
            if arena.supervised_steps and _stored(arena, directory, options) is None:
                jobs[f"cold {label}"] = pool.submit(build_cold_start, arena, options)
            jobs[f"judge {label}"] = pool.submit(build_judge, arena, options, options.seeds * len(pair.points))
        if pair.key not in jobs:
            jobs[pair.key] = pool.submit(build_pair, pair, options)


def build_cold_start(arena: Arena, options: Options) -> Programs:
    """The supervised phase of an environment; ``init(key)``."""
    episodes, steps = options.supervised_episodes, arena.supervised_steps
    algorithm, env = algorithms.make("behavior_cloning"), bench_grid.split(arena)[0]
    config = TrainConfig(
        episodes, 1, min(options.slots, episodes) or None, arena.max_tokens, arena.segments,
        UpdateConfig(schedule="cosine"),
    )  # fmt: skip
    numbers = {"learning_rate": options.supervised_learning_rate, "warmup": options.supervised_warmup, "decay": steps}
    parts = arena.policy, arena.codec, env, algorithm, config
    hyper = train.make_hyper(algorithm, env, **numbers)
    init = jax.jit(train.make_init(*parts))
    return Programs(lambda key: init(key, hyper), _steps(parts, hyper, steps, "map", 1))


def build_judge(arena: Arena, options: Options, lanes: int) -> Lanes:
    """The evaluation in an environment."""
    judge = make_judge(arena, bench_grid.split(arena)[1], options)
    params = jax.eval_shape(arena.policy.init, jax.eval_shape(lambda: jax.random.key(0)))
    return Lanes(judge, options.how, lanes).compile((params, params, canonical_params(arena.env.params)))


def build_pair(pair: Pair, options: Options) -> Programs:
    """The training of a pair."""
    arena, lanes = pair.arena, options.seeds * len(pair.points)
    parts = arena.policy, arena.codec, bench_grid.split(arena)[0], pair.method.algorithm, pair.config
    init = jax.jit(jax.vmap(train.make_init(*parts), (0, 0, None)))
    hyper = bench_grid.hyper(pair.method, arena, pair.points[0], options)
    return Programs(init, _steps(parts, hyper, options.max_steps, options.how, lanes))


def _steps(parts: tuple, hyper: Hyper, limit: int, how: str, lanes: int) -> Lanes:
    state = jax.eval_shape(train.make_init(*parts), jax.random.key(0), hyper)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return Lanes(make_advance(train.make_step(*parts), limit), how, lanes).compile((state, number, number))


def prepare(
    arena: Arena, directory: Path, options: Options, jobs: Mapping[str, Future[Any]], say: Callable[[str], None]
) -> Ground:
    """The cold start, or its checkpoint, and its evaluation; ``jobs`` are those of ``ahead``."""
    note = bench_grid.split(arena)[2]
    params = cold_start(arena, directory, options, jobs, say)
    program = jobs[f"judge {arena.label}"].result()
    many = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (program.lanes, *jnp.shape(x))), tree)  # noqa: E731

    def evaluate(runs: PyTree, env_params: PyTree) -> list[dict[str, Any]]:
        found = jax.device_get(program((runs, many(params), env_params)))
        lanes = ({name: x[lane] for name, x in found.items()} for lane in range(program.lanes))
        return [spelled(lane, options.eval_samples) for lane in lanes]

    start = evaluate(many(params), many(canonical_params(arena.env.params)))[0]
    return Ground(params, start, evaluate, note)


def _stored(arena: Arena, directory: Path, options: Options) -> int | None:
    """The steps of a cold start on disk that is whole."""
    folder = _folder(arena, directory, options)
    return checkpoint.latest(folder) if folder.is_dir() else None


def _folder(arena: Arena, directory: Path, options: Options) -> Path:
    """Where the weights of a cold start are: under a hash of all they depend on."""
    settings = bench_grid.cold_start_settings(arena, options)
    return directory / "cold_start" / bench_grid.digest(settings)


def cold_start(
    arena: Arena, directory: Path, options: Options, jobs: Mapping[str, Future[Any]], say: Callable[[str], None]
) -> PyTree:
    """Weights after the supervised phase, kept on disk; random ones without it."""
    key = jax.random.key(options.seed)
    if not arena.supervised_steps:
        return jax.jit(arena.policy.init)(key)
    folder = _folder(arena, directory, options)
    if f"cold {arena.label}" not in jobs:
        return checkpoint.restore(folder, jax.eval_shape(arena.policy.init, key)).state
    programs, clock = jobs[f"cold {arena.label}"].result(), time.monotonic()
    state = jax.tree.map(lambda x: x[None], programs.init(key))
    steps = arena.supervised_steps
    states, _, rows = run_to(programs.advance, state, jnp.zeros(1, jnp.int32), FOREVER, steps)
    params = jax.tree.map(lambda x: x[0], states.params["policy"])
    with checkpoint.Checkpoints(folder, keep_last=1) as checkpoints:
        notes = {"settings": bench_grid.cold_start_settings(arena, options)}
        checkpoints.save(steps, params, notes, wait=True)
    say(
        f"cold start of {arena.label}: {steps} steps, {rows[0]['loss'][-1]:.3f} nats per token at the end, "
        f"{time.monotonic() - clock:.0f} s"
    )
    return params


def run_pair(pair: Pair, ground: Ground, options: Options, job: Future[Programs]) -> dict[str, Any]:
    """Trains every point and seed of a pair to its budget: ``{"groups": [...], "seconds": {...}}``.

    A group is a point: its label, numbers, ``agreement`` of the first gradients and ``seeds``, of each the metrics of
    every step (``steps``, with ``used``, the tokens so far) and its evaluations (``evals``, the start's first). Of the
    seconds ``compile`` was spent beside others, ``wait`` is what of it was waited for.

    Raises:
      FloatingPointError: an evaluation that is not finite.
    """
    clock = time.monotonic()
    programs = job.result()
    waited = time.monotonic() - clock
    hypers = [bench_grid.hyper(pair.method, pair.arena, point, options) for point in pair.points]
    hypers = [hyper for hyper in hypers for _ in range(options.seeds)]
    seed = jnp.tile(jnp.arange(options.seeds), len(pair.points))
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(options.seed)))(seed)
    states = programs.init(keys, jax.tree.map(lambda *x: jnp.stack(x), *hypers), ground.params)
    used, judging = jnp.zeros(len(hypers), jnp.int32), 0.0
    lanes = [{"steps": {}, "evals": [{"used": 0, "step": 0, **ground.start}]} for _ in hypers]
    states, used, first = run_to(programs.advance, states, used, 1, options.max_steps)
    for lane, row in zip(lanes, first, strict=True):
        lane["steps"].update(row)
    # The gradient of an untrained value head is much the same for all seeds, and would pass for agreement.
    critic = "critic" in pair.method.algorithm.needs
    agreements = [None] * len(pair.points) if critic else agreement(states.opt_state, options.seeds)
    for i in range(options.evals):
        target = pair.arena.budget * (i + 1) // options.evals
        states, used, rows = run_to(programs.advance, states, used, target, options.max_steps)
        begun = time.monotonic()
        found = ground.evaluate(states.params["policy"], states.hyper.env_params)
        judging += time.monotonic() - begun
        _note(lanes, rows, found, jax.device_get((used, states.step)))
    seconds = {"wait": waited, "evaluate": judging, "train": time.monotonic() - clock - waited - judging}
    groups = [
        {**point._asdict(), "agreement": agreements[i], "seeds": lanes[i * options.seeds : (i + 1) * options.seeds]}
        for i, point in enumerate(pair.points)
    ]
    return {"groups": groups, "seconds": seconds | {"compile": programs.advance.seconds}, "note": ground.note}


def agreement(opt_state: PyTree, seeds: int) -> list[float | None]:
    """Mean cosine between the first gradients of a point's seeds, whose runs begin from the same weights.

    ``mean_{i != j} cos(g_i, g_j)``, about ``|E g|^2 / (|E g|^2 + tr Cov g)``: 1 without noise, 0 where the gradient is
    nothing else, and independent of its scale. ``opt_state [L, ...]`` is that of Adam after one step; its first moment
    is the gradient, or where a step makes several updates their moving average. None with one seed, or where all
    gradients but one are 0. It is that of the first step: baselines with a memory are still empty there.
    """
    moments = [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(optax.tree.get(opt_state, "mu"))]
    flat = np.concatenate([x.reshape(len(x), -1) for x in moments], axis=1).astype(np.float64)
    found: list[float | None] = []
    for of_point in np.split(flat, len(flat) // seeds):
        norms = np.linalg.norm(of_point, axis=1, keepdims=True)
        unit = of_point[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
        n = len(unit)
        found.append(None if n < 2 else float((np.sum(unit.sum(0) ** 2) - n) / (n * (n - 1))))
    return found


def _note(lanes: list[dict], rows: list[dict], found: list[dict], counts: tuple[np.ndarray, np.ndarray]) -> None:
    for lane, new, numbers, used, step in zip(lanes, rows, found, *counts, strict=True):
        for name, values in new.items():
            lane["steps"].setdefault(name, []).extend(values)
        lane["evals"].append({"used": int(used), "step": int(step), **numbers})
