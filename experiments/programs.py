"""The compiled programs of a run, and what stops it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from building import Phase, Setup

from agentrl_jax import metrics, train
from agentrl_jax.evaluate import Evaluation, make_evaluate


class Programs:
    """The compiled programs, made in the background in the order they are needed: XLA leaves cores idle."""

    def __init__(self, setup: Setup, ahead: Sequence[Phase], begun: str, key: jax.Array) -> None:
        """Begins to compile what the phases ahead need; the one that has begun needs no init."""
        self._pool = ThreadPoolExecutor(2)
        self._programs: dict[str, Future[Any]] = {}
        number = jax.ShapeDtypeStruct((), jnp.float32)
        for phase in ahead:
            state, hyper = setup.abstract(phase), setup.hyper(phase)
            params = state.params["policy"]
            if phase.name != begun:
                before = None if phase is setup.phases[0] else params
                self._add(f"{phase.name} init", setup.init(phase), key, hyper, before)
            self._add(
                phase.name, steps_at_once(setup, phase), state, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0
            )
            if phase is ahead[0]:
                self._add("evaluate", evaluator(setup), params, key, hyper.env_params, number)

    def _add(self, name: str, function: Callable, *arguments: Any, **options: Any) -> None:
        compile_ = lambda: jax.jit(function, **options).lower(*arguments).compile()  # noqa: E731
        self._programs[name] = self._pool.submit(compile_)

    def __getitem__(self, name: str) -> Any:
        """The program, when it is there."""
        return self._programs[name].result()

    def close(self) -> None:
        """Drops what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def steps_at_once(setup: Setup, phase: Phase) -> Callable:
    """``(state, count) -> (state, {name: [calls]})``: up to ``calls`` steps, so a short remainder compiles nothing."""
    step = train.make_step(setup.policy, setup.codec, setup.env, phase.algorithm, phase.config)

    def one(state: train.TrainState) -> tuple[train.TrainState, dict[str, jax.Array]]:
        state, found = step(state)
        return state, metrics.finalize(found)

    def many(state: train.TrainState, count: jax.Array) -> tuple[train.TrainState, dict[str, jax.Array]]:
        shapes = jax.eval_shape(one, state)[1]
        rows = jax.tree.map(lambda x: jnp.zeros((phase.calls, *x.shape), x.dtype), shapes)

        def body(i: jax.Array, carry: tuple) -> tuple:
            state, found = one(carry[0])
            return state, jax.tree.map(lambda row, x: row.at[i].set(x), carry[1], found)

        return jax.lax.fori_loop(0, count, body, (state, rows))

    return many


def evaluator(setup: Setup, **filters: Any) -> Callable[..., Evaluation]:
    """Evaluation of held-out tasks at the sizes of the settings."""
    chosen = setup.settings
    episodes = chosen.eval_problems * (1 + chosen.eval_samples)
    return make_evaluate(
        setup.policy, setup.codec, setup.test, problems=chosen.eval_problems, samples=chosen.eval_samples,
        max_tokens=setup.max_tokens, slots=min(chosen.slots or chosen.episodes, episodes), segments=chosen.segments,
        **filters,
    )  # fmt: skip


class Stop:
    """Notes SIGTERM and Ctrl-C: the run stops between two steps, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        """Installs the handlers."""
        self.signal = 0
        self._old = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self.signal = number
        os.write(2, b"\nstopping after this step; once more to stop at once, without a checkpoint\n")
        self.restore()

    def restore(self) -> None:
        """Puts the former handlers back."""
        for number, old in self._old.items():
            signal.signal(number, old)


def use_cache(folder: str) -> None:
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
