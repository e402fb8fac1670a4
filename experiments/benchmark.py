"""Compares algorithms over environments and seeds: same cold start, same tokens, held-out success with intervals.

    python experiments/benchmark.py --algos=grpo,rloo,ppo --envs=guess,calculator --seeds=4
    python experiments/benchmark.py --algos=grpo,grpo:eps_high=0.28:label=clip-higher --envs=guess:high=50:max_turns=8
    python experiments/benchmark.py --algos=grpo --envs=guess --sweep="learning_rate=1e-4,3e-4;eps_high=.2,.28"

Everything is under runs/NAME: a file a finished pair (pairs/), the weights all begin from (cold_start/), table.md,
table.json and the figures. Started again it goes on: what is finished, with the very same settings, is not done twice.
The exit status is 1 when a pair failed; the others are in the tables all the same.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench_grid
import bench_plots
import bench_report
import bench_train
import jax
import train as training
from absl import app, flags, logging
from bench_grid import Options, Pair
from programs import use_cache

import agentrl_jax
from agentrl_jax.files import safe_child, write_atomic

DONE, FAILED, LEFT_OUT = "done", "failed", "not applicable"
AHEAD = 2
"""Pairs whose programs are compiled or being compiled: the one in play and the next."""


def define_flags(values: flags.FlagValues) -> None:
    """One flag for each entry of the table in ``bench_grid.py``."""
    training.define_flags(values, Options)


def finished(directory: Path, pair: Pair) -> dict[str, Any] | None:
    """The stored result of a pair with these very settings; None: it is to be done."""
    path = directory / "pairs" / pair.file
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if found.get("status") == DONE else None


def run(pairs: Sequence[Pair], directory: Path, options: Options) -> list[dict[str, Any]]:
    """Results of all pairs in order, those that are stored from disk; a failure is a result like any other."""
    (directory / "pairs").mkdir(parents=True, exist_ok=True)
    stored = [None if pair.reason else finished(directory, pair) for pair in pairs]
    todo = [pair for pair, known in zip(pairs, stored, strict=True) if not pair.reason and known is None]
    jobs: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(1) as pool:
        try:
            prepare = lambda done: bench_train.ahead(jobs, pool, todo[done : done + AHEAD], directory, options)  # noqa: E731
            return _in_turn(pairs, stored, jobs, prepare, directory, options)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_turn(
    pairs: Sequence[Pair],
    stored: Sequence[Any],
    jobs: dict[str, Future[Any]],
    prepare: Callable[[int], None],
    directory: Path,
    options: Options,
) -> list[dict[str, Any]]:
    results, ground, done = [], (None, None), 0
    for number, (pair, known) in enumerate(zip(pairs, stored, strict=True)):
        about = {"method": pair.method.label, "arena": pair.arena.label, "budget": pair.arena.budget}
        head = f"[{number + 1}/{len(pairs)}] {pair.label}"
        if pair.reason:
            results.append({**about, "status": LEFT_OUT, "reason": pair.reason})
            _say(f"{head}: not applicable: {pair.reason}")
        elif known is not None:
            results.append(known)
            _say(f"{head}: finished before")
        else:
            prepare(done)
            done += 1
            if ground[0] is not pair.arena:
                ground = (pair.arena, _ground(pair, directory, options, jobs))
            result = _one(pair, ground[1], options, jobs)
            results.append({**about, "key": pair.key, "settings": pair.settings, **_spelled(result)})
            write_atomic(directory / "pairs" / pair.file, json.dumps(results[-1], allow_nan=False) + "\n")
            _say(f"{head}: {_in_short(results[-1])}")
    return results


def _ground(
    pair: Pair, directory: Path, options: Options, jobs: dict[str, Future[Any]]
) -> bench_train.Ground | dict[str, Any]:
    """What the pairs of an environment share, or the failure that all of them then have."""
    try:
        return bench_train.prepare(pair.arena, directory, options, jobs, _say)
    except Exception as error:
        return _failure(error)


def _one(
    pair: Pair, ground: bench_train.Ground | dict[str, Any], options: Options, jobs: dict[str, Future[Any]]
) -> dict[str, Any]:
    if isinstance(ground, dict):
        return ground
    try:
        return {"status": DONE, **bench_train.run_pair(pair, ground, options, jobs.pop(pair.key))}
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"status": FAILED, "reason": reason, "traceback": "".join(traceback.format_exception(error))}


def _spelled(value: Any) -> Any:
    """What JSON can hold: six digits, None for what is not finite."""
    if isinstance(value, dict):
        return {name: _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _in_short(result: dict[str, Any]) -> str:
    if result["status"] != DONE:
        return f"failed: {result['reason']}"
    found = bench_report.outcomes(result)
    start = found[0].success[0, 0]
    ends = [(f"{o.label}: " if len(found) > 1 else "") + f"{o.final.mean():.1%}" for o in found]
    used = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    return f"success {start:.1%} -> {', '.join(ends)}; {used}"


def write_report(results: Sequence[dict[str, Any]], directory: Path, options: Options, command: str) -> list[Path]:
    """Tables and figures of what is done; the files."""
    found = [outcome for result in results if result["status"] == DONE for outcome in bench_report.outcomes(result)]
    others = [result for result in results if result["status"] != DONE]
    about = {
        "command": command, "versions": {"agentrl_jax": agentrl_jax.__version__, "jax": jax.__version__},
        "backend": jax.default_backend(),
    }  # fmt: skip
    numbers = bench_report.report(found, others, baseline=options.baseline, bar=options.bar, about=about)
    write_atomic(directory / "table.json", json.dumps(_spelled(numbers), indent=1, allow_nan=False) + "\n")
    write_atomic(directory / "table.md", bench_report.markdown(numbers))
    return [directory / "table.md", directory / "table.json", *bench_plots.draw(directory, found, options.baseline)]


def benchmark(given: dict[str, Any], command: str) -> int:
    """Runs what the flags say; the exit status: 0, 1 when a pair failed, 2 for a wrong setting."""
    started = time.monotonic()
    try:
        options = Options(**given)
        pairs = bench_grid.plan(options)
        directory = safe_child(options.root, options.name)
        directory.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    use_cache(options.compile_cache)
    _say(f"{directory}: {len(pairs)} pairs, {options.seeds} seeds, {jax.local_device_count()} devices")
    try:
        results = run(pairs, directory, options)
    except KeyboardInterrupt:
        _say("stopped: the same command goes on with the pair that was in play")
        return 130
    files = write_report(results, directory, options, command)
    _say((directory / "table.md").read_text(encoding="utf-8"))
    _say(f"{time.monotonic() - started:.0f} s; files: {', '.join(map(str, files))}")
    return 1 if any(result["status"] == FAILED for result in results) else 0


def divide_cpu(given: dict[str, Any]) -> None:
    """Sets the number of CPU devices, before JAX is used; a user's own ``XLA_FLAGS`` win."""
    wanted, seeds = (given.get(name, getattr(Options, name)) for name in ("cpu_devices", "seeds"))
    count = wanted or min(os.cpu_count() or 1, seeds)
    if count > 0 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str]) -> int:
    del argv
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    command = "python experiments/benchmark.py " + shlex.join(sys.argv[1:])
    given = training.given(flags.FLAGS, Options)
    divide_cpu(given)
    return benchmark(given, command)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=training.parse)
