"""The update: batch to loss to gradient to new parameters, over epochs, minibatches and micro-batches.

Denominators are fixed over the minibatch before it is split, so micro-batches and devices only add, and any split
gives the same gradient. Rows are sorted by length and each micro-batch is computed at the narrowest of a few static
widths that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from agentrl_jax import control
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Algorithm, Hyper, TrainState
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Score

ScoreFn = Callable[[PyTree, str, Batch], Score]
"""``(params by model, view name, batch) -> Score``, differentiable."""


class UpdateConfig(NamedTuple):
    """Static structure of an update.

    Attributes:
      epochs: passes over the batch.
      minibatches: optimiser updates a pass.
      microbatches: pieces a minibatch is computed in, for memory and for narrow widths.
      widths: static widths below the full one at which a micro-batch may be computed.
      schedule: ``constant``, ``linear`` or ``cosine``, after the warm-up.
      optimizer: ``adam`` or ``sgd``.
      b1, b2, eps: of Adam.
    """

    epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1
    widths: tuple[int, ...] = ()
    schedule: str = "constant"
    optimizer: str = "adam"
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8


def direction(config: UpdateConfig) -> optax.GradientTransformation:
    """The optimiser without its step size, which is traced."""
    if config.optimizer == "sgd":
        return optax.identity()
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def learning_rate(config: UpdateConfig, hyper: Hyper, updates: Array) -> Array:
    """``peak * warm-up * schedule`` at the given number of optimiser updates."""
    count = updates.astype(jnp.float32)
    warm = jnp.minimum(1.0, (count + 1) / jnp.maximum(hyper.warmup, 1.0))
    done = jnp.clip((count - hyper.warmup) / jnp.maximum(hyper.decay - hyper.warmup, 1.0), 0.0, 1.0)
    # Without an end the others have no shape: `apply` refuses and counts what is not a number.
    done = jnp.where(hyper.decay > 0, done, jnp.nan)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done))}
    return hyper.learning_rate * warm * shape[config.schedule]


def trained_models(algorithm: Algorithm) -> tuple[str, ...]:
    """Names of the models under gradient."""
    return tuple(sorted({view.model for view in algorithm.views.values()}))


def _time_axes(batch: Batch) -> Batch:
    """True for every leaf whose last axis is time."""
    shape = batch.mask.shape
    flags = jax.tree.map(lambda x: x.shape == shape, batch)
    traj = flags.traj._replace(steps=jax.tree.map(lambda _: False, batch.traj.steps))
    return flags._replace(traj=traj._replace(record=jax.tree.map(lambda _: False, batch.traj.record)))


def trim(batch: Batch, width: int) -> Batch:
    """The first ``width`` tokens of every per-token array."""
    return jax.tree.map(lambda x, time: x[..., :width] if time else x, batch, _time_axes(batch))


def take(batch: Batch, index: Array) -> Batch:
    """The given units of every array."""
    return jax.tree.map(lambda x: x[index], batch)


def gradient(
    algorithm: Algorithm,
    score: ScoreFn,
    params: dict[str, PyTree],
    batch: Batch,
    hyper: dict[str, Array],
    *,
    microbatches: int = 1,
    widths: Sequence[int] = (),
    single: bool = False,
) -> tuple[PyTree, Array, Metrics]:
    """``(gradient, loss, metrics)`` of one weighed minibatch, summed over its micro-batches.

    The gradient is a dictionary over the trained models. ``microbatches`` must divide the units.
    """
    names = trained_models(algorithm)
    full = batch.mask.shape[-1]
    widths = (*sorted({w for w in widths if 0 < w < full}), full)

    def loss(trained: dict[str, PyTree], batch: Batch) -> tuple[Array, Metrics]:
        scores = {name: score({**params, **trained}, name, batch) for name in algorithm.views}
        if single and "policy" in scores:
            batch = batch._replace(logp_old=jax.lax.stop_gradient(scores["policy"].logp))
        return algorithm.loss(scores, batch, hyper)

    def at(width: int) -> Callable:
        return lambda t, b: jax.value_and_grad(loss, has_aux=True)(t, trim(b, width))

    branches = [at(w) for w in widths]
    trained = {name: params[name] for name in names}

    def one(batch: Batch):
        if len(branches) == 1:
            return branches[0](trained, batch)
        return jax.lax.switch(control.width_index(widths, batch.traj.length), branches, trained, batch)

    if microbatches == 1:
        (value, metrics), grads = one(batch)
        return grads, value, metrics
    longest = jnp.max(batch.traj.length.reshape(batch.mask.shape[0], -1), axis=1)
    batch = take(batch, jnp.argsort(longest))
    batch = jax.tree.map(lambda x: x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:]), batch)

    def step(total, micro):
        (value, metrics), grads = one(micro)
        return jax.tree.map(jnp.add, total, (grads, value)), metrics

    zero = (jax.tree.map(jnp.zeros_like, trained), jnp.zeros(()))
    (grads, value), metrics = jax.lax.scan(step, zero, batch)
    return grads, value, metrics_lib.reduce(metrics)


def apply(
    config: UpdateConfig, state: TrainState, grads: PyTree, active: Array | bool = True
) -> tuple[TrainState, Metrics]:
    """One optimiser update from the whole minibatch's gradient; refused, and counted, where it or a number of the run
    is not finite. Where nothing is ``active`` there is no update: momentum and decay would move the parameters."""
    hyper, names = state.hyper, tuple(grads)
    norm = optax.tree.norm(grads)
    scale = jnp.minimum(1.0, hyper.max_grad_norm / jnp.maximum(norm, 1e-12))
    rate = learning_rate(config, hyper, state.updates)
    finite = jnp.all(jnp.isfinite(jnp.stack([norm, scale, rate, hyper.weight_decay])))
    active = jnp.asarray(active)
    fine = finite & active
    grads = jax.tree.map(lambda g: jnp.where(fine, g * scale, 0.0).astype(g.dtype), grads)
    trained = {name: state.params[name] for name in names}
    delta, opt_state = direction(config).update(grads, state.opt_state, trained)

    def move(p, d):
        decay = hyper.weight_decay * p if p.ndim > 1 else 0.0
        return (p - rate * (d + decay)).astype(p.dtype)

    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)  # noqa: E731
    params = {**state.params, **keep(jax.tree.map(move, trained, delta), trained)}
    state = state._replace(
        params=params,
        opt_state=keep(opt_state, state.opt_state),
        updates=state.updates + fine,
        skipped=state.skipped + (active & ~finite),
    )
    one = jnp.ones(())
    metrics = {
        "grad_norm": (jnp.where(fine, norm, 0.0), fine.astype(jnp.float32)),
        "clipped_updates": ((scale < 1.0).astype(jnp.float32), one),
        "skipped_updates": ((active & ~finite).astype(jnp.float32), one),
        "learning_rate": (rate, one),
    }
    return state, metrics


def update(
    algorithm: Algorithm,
    config: UpdateConfig,
    score: ScoreFn,
    state: TrainState,
    batch: Batch,
    key: Array,
    *,
    segments: int = 1,
    single: bool = False,
    differentiate: Callable[..., tuple[PyTree, Array, Metrics]] = gradient,
) -> tuple[TrainState, Metrics]:
    """All epochs and minibatches of one step. Units are shuffled in blocks of ``segments`` rows, so an episode stays
    whole.

    ``differentiate`` may be replaced by a ``gradient`` that adds over devices; the minibatch it gets is already
    weighed.

    Raises:
      ValueError: ``minibatches * microbatches`` does not divide the units.
    """
    units = batch.mask.shape[0]
    block = segments if units % segments == 0 and batch.mask.ndim == 2 else 1
    if (units // block) % config.minibatches or (units // config.minibatches) % config.microbatches:
        raise ValueError(
            f"{units} units in blocks of {block} do not split into {config.minibatches} minibatches of "
            f"{config.microbatches} micro-batches"
        )
    hyper = state.hyper.algorithm

    def minibatch(state: TrainState, index: Array | None) -> tuple[TrainState, Metrics]:
        part = algorithm.weigh(batch if index is None else take(batch, index), hyper, block)
        grads, loss, metrics = differentiate(
            algorithm, score, state.params, part, hyper,
            microbatches=config.microbatches, widths=config.widths, single=single,
        )  # fmt: skip
        state, more = apply(config, state, grads, jnp.any(part.mask))
        # Counted over the whole minibatch: inside the loss it would be divided by the number of pieces.
        whole = {"loss": metrics_lib.scalar(loss), "loss_tokens": metrics_lib.scalar(jnp.sum(part.mask))}
        return state, {**metrics, **more, **whole}

    if config.epochs == config.minibatches == 1:
        return minibatch(state, None)

    def order(key: Array) -> Array:
        blocks = jax.random.permutation(key, units // block)
        rows = blocks[:, None] * block + jnp.arange(block, dtype=blocks.dtype)
        return rows.reshape(config.minibatches, -1)

    indices = jax.vmap(order)(jax.random.split(key, config.epochs))
    state, metrics = jax.lax.scan(minibatch, state, indices.reshape(config.epochs * config.minibatches, -1))
    return state, metrics_lib.reduce(metrics)
