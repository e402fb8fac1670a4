"""Training: one step is one program (rollout, advantage, update), a whole run is a scan of steps.

``make_step`` returns ``step(state) -> (state, metrics)``; ``make_train`` returns ``train(key, hyper) -> (state,
metrics)``. Both are
pure: ``jit``, ``vmap`` over seeds and hyper-parameters, ``pmap`` or shard them (``parallel.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax import metrics as metrics_lib
from agentrl_jax import scoring, update
from agentrl_jax.algorithm import Algorithm, Hyper, Shape, Tools, TrainState, keep_state, start_for_expert
from agentrl_jax.checks import check_numbers, known
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment, canonical_params, played_member
from agentrl_jax.game import STEPS, check_room, check_start, check_vocabulary
from agentrl_jax.policy import Policy
from agentrl_jax.rollout import rollout as play
from agentrl_jax.types import Array, Batch, Metrics, PyTree, Start, Trajectory
from agentrl_jax.update import UpdateConfig

Step = Callable[[TrainState], tuple[TrainState, Metrics]]

NEEDS = ("critic", "expert", "group", "logp_old", "one_segment", "pairs", "reference", "single")
"""What ``Algorithm.needs`` may name."""

RESERVED = (
    "reward", "turns", "length", "written", "truncated", "cut_actions", "tokens", "logp", "tool_rate",
    "zero_variance", "pairs_kept", "baseline", "kl_reward", "explained_variance", "anchored", "key_token", "overlong",
    "dense_reward", "distinct_episodes", "silenced", "correction_weight", "beta", "desirable", "kto_reference",
    "perception", "imitation", "mc_value", "extra_tokens", "inherited_tokens", "rounds", "hint", "greedy_return",
    "skipped", "in_epoch", "replay_share", "replay_age", "kept_varied", "kept_complete", "kept_uncertain",
    "kept_uncertain_mass", "kept_best_of_group", "kept_correct", "kept_not_all_correct", "kept_offpolicy",
    "entropy", "kl_old", "max_logp_gap", "clip_high", "clip_low", "kl", "value_loss", "margin", "preference_accuracy",
    "loss", "loss_tokens", "grad_norm", "clipped_updates", "skipped_updates", "learning_rate",
)  # fmt: skip
"""Metrics of rollouts, stages, objectives and updates: an environment's info must not be called so."""


class TrainConfig(NamedTuple):
    """Static structure of a step.

    Attributes:
      episodes: sampled in a step, a multiple of ``group_size``.
      group_size: episodes that share a task.
      slots: rows in play at once; None: all of them.
      max_tokens: ``T`` of a row.
      segments: rows an episode may use where its context restarts.
      update: epochs, minibatches, micro-batches, widths, optimiser.
      chunk, feed_rows, env_rows: schedule of the rollout, see ``rollout.Sizes``; None: its defaults.
      vocab_chunk: tokens whose logits exist at once in scoring; None: all when they are few.
    """

    episodes: int = 128
    group_size: int = 8
    slots: int | None = None
    max_tokens: int = 96
    segments: int = 1
    update: UpdateConfig = UpdateConfig()
    chunk: int | None = None
    feed_rows: int | None = None
    env_rows: int | None = None
    vocab_chunk: int | None = None


def make_hyper(algorithm: Algorithm, env: Environment, **numbers: Any) -> Hyper:
    """The numbers of a run, as strong float32 arrays: ``Hyper`` fields and the algorithm's own, by name.

    Args:
      algorithm: gives its defaults.
      env: gives its default parameters, unless ``env_params`` is among the numbers.
      **numbers: ``learning_rate=3e-4``, ``eps_high=0.28``, ...

    Raises:
      ValueError: an unknown name, naming the known ones; a number that is out of range.
    """
    fields = set(Hyper._fields) - {"algorithm"}
    unknown = sorted(set(numbers) - fields - set(algorithm.hyper))
    if unknown:
        known = ", ".join(sorted(fields | set(algorithm.hyper)))
        raise ValueError(f"unknown hyper-parameters {unknown}; {algorithm.name} has: {known}")
    check_numbers({**algorithm.hyper, **{k: v for k, v in numbers.items() if k != "env_params"}})
    own = {k: jnp.asarray(numbers.get(k, v), jnp.float32) for k, v in algorithm.hyper.items()}
    outer = {k: v for k, v in numbers.items() if k in fields and k != "env_params"}
    defaults = {k: v for k, v in Hyper()._asdict().items() if k not in ("env_params", "algorithm")}
    outer = {k: jnp.asarray(v, jnp.float32) for k, v in (defaults | outer).items()}
    return Hyper(**outer, env_params=canonical_params(numbers.get("env_params", env.params), env.params), algorithm=own)


def check(policy: Policy, codec: Codec, env: Environment, algorithm: Algorithm, config: TrainConfig) -> None:
    """Refuses what cannot work, before anything is compiled.

    Raises:
      ValueError: naming the value and what is allowed.
    """
    _check_sizes(codec, config)
    _check_needs(policy, env, algorithm, config)
    _check_update(algorithm, config)
    taken = sorted(dict(env.spec.info).keys() & (set(RESERVED) | set(STEPS)))
    if taken:
        raise ValueError(f"{env.name}: EnvSpec.info must not use the names {taken}, which are metrics of a step")
    check_vocabulary(policy, codec, jax.eval_shape(policy.init, jax.eval_shape(lambda: jax.random.key(0))))


def _check_sizes(codec: Codec, config: TrainConfig) -> None:
    if config.episodes % config.group_size or min(config.episodes, config.group_size) < 1:
        raise ValueError(f"episodes ({config.episodes}) must be a multiple of group_size ({config.group_size})")
    slots = config.slots if config.slots is not None else config.episodes
    if not 1 <= slots <= config.episodes:
        raise ValueError(f"slots must be in [1, episodes = {config.episodes}], got {slots}")
    check_room(codec, config.max_tokens)
    for name in ("segments", "chunk", "feed_rows", "env_rows", "vocab_chunk"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_needs(policy: Policy, env: Environment, algorithm: Algorithm, config: TrainConfig) -> None:
    name, needs = algorithm.name, algorithm.needs
    parts = sorted(need.removeprefix("parts:") for need in needs if need.startswith("parts:"))
    least = max([1, *(int(need.removeprefix("group>=")) for need in needs if need.startswith("group>="))])
    unknown = sorted(need for need in needs if need not in NEEDS and not need.startswith(("parts:", "group>=")))
    if unknown:
        raise ValueError(
            f"{name} needs {unknown}, which nothing provides; known: {', '.join(NEEDS)}, parts:NAME, group>=NUMBER"
        )
    missing = sorted(set(parts) - set(dict(env.spec.info)))
    if missing:
        there = ", ".join(dict(env.spec.info)) or "nothing"
        raise ValueError(f"{name} needs the parts {missing} in the environment's info; {env.name} reports: {there}")
    if "one_segment" in needs and config.segments > 1:
        raise ValueError(f"{name} does not play contexts that restart: segments must be 1, got {config.segments}")
    if needs & {"group", "pairs"} and config.group_size < 2:
        raise ValueError(f"{name} compares members of a group: group_size must be at least 2, got 1")
    if config.group_size < least:
        size = config.group_size
        raise ValueError(f"{name} draws {least} of a group: group_size must be at least {least}, got {size}")
    if "critic" in needs and not policy.has_value:
        raise ValueError(f"{name} needs a critic: build the policy with a value head")
    if "expert" in needs and env.expert is None:
        raise ValueError(f"{name} needs env.expert, and {env.name} has none")
    for label, view in algorithm.views.items():
        _check_model(f"{name}: the view {label!r}", view, ("policy", *sorted(needs & {"reference"})))


def _check_model(who: str, view: scoring.View, models: Iterable[str]) -> None:
    if view.model not in models:
        raise ValueError(f"{who} asks for the model {view.model!r}; there is: {', '.join(models)}")


def _check_update(algorithm: Algorithm, config: TrainConfig) -> None:
    structure = config.update
    for name in ("epochs", "minibatches", "microbatches"):
        if getattr(structure, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(structure, name)}")
    units = config.episodes // config.group_size if "pairs" in algorithm.needs else config.episodes
    if units % (structure.minibatches * structure.microbatches):
        raise ValueError(
            f"{units} units do not split into {structure.minibatches} minibatches of "
            f"{structure.microbatches} micro-batches"
        )
    if "single" in algorithm.needs and structure.epochs * structure.minibatches > 1:
        raise ValueError(
            f"{algorithm.name} does not correct for a policy that has moved, as every update after the first needs: "
            f"epochs and minibatches must be 1, got {structure.epochs} and {structure.minibatches}"
        )
    if structure.schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule must be constant, linear or cosine, got {structure.schedule!r}")
    if structure.optimizer not in ("adam", "sgd"):
        raise ValueError(f"optimizer must be adam or sgd, got {structure.optimizer!r}")
    if any(not 1 <= width <= config.max_tokens for width in structure.widths):
        raise ValueError(f"widths must be in [1, max_tokens = {config.max_tokens}], got {structure.widths}")


def make_init(
    policy: Policy, codec: Codec, env: Environment, algorithm: Algorithm, config: TrainConfig
) -> Callable[..., TrainState]:
    """``init(key, hyper=None, params=None) -> TrainState``; ``params`` of the policy continue from an earlier phase.

    The reference policy, where the algorithm needs one, is a copy of the policy at this moment. ``hyper`` and
    ``params`` are copied too, so that donating the state leaves the caller's arrays alone.
    """
    check(policy, codec, env, algorithm, config)
    shape = Shape(config.episodes, config.group_size, config.max_tokens, env.spec.max_turns)

    def init(key: Array, hyper: Hyper | None = None, params: PyTree | None = None) -> TrainState:
        hyper = make_hyper(algorithm, env) if hyper is None else hyper
        if config.update.schedule != "constant" and known(hyper.decay) and not hyper.decay > 0:
            raise ValueError(
                f"the {config.update.schedule} schedule needs decay, the updates after which it has run out"
            )
        model_key, memory_key, key = jax.random.split(key, 3)
        copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
        models = {"policy": policy.init(model_key) if params is None else copy(params)}
        if "reference" in algorithm.needs:
            # An alias inside a donated state would be donated twice.
            models["reference"] = copy(models["policy"])
        trained = {name: models[name] for name in update.trained_models(algorithm)}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=models,
            opt_state=update.direction(config.update).init(trained),
            updates=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            memory=algorithm.init(memory_key, shape),
            hyper=copy(hyper),
            key=key,
        )

    return init


def make_step(
    policy: Policy,
    codec: Codec,
    env: Environment,
    algorithm: Algorithm,
    config: TrainConfig,
    *,
    rollout: Callable[..., Trajectory] = play,
    differentiate: Callable[..., tuple[PyTree, Array, Metrics]] = update.gradient,
) -> Step:
    """``step(state) -> (state, metrics)``: rollout, advantage and update as one pure function.

    ``rollout`` may be replaced by one that spreads episodes over devices (``parallel.sharded_rollout``), and
    ``differentiate`` by a gradient that does (``parallel.pmap_data_parallel``).
    """
    check(policy, codec, env, algorithm, config)
    score = _score_fn(policy, codec, algorithm, config)

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        roll_key, prepare_key, update_key = jax.random.split(key, 3)
        tools = _tools(policy, codec, env, algorithm, config, state, rollout)
        memory, traj = algorithm.collect(state.memory, tools, state.hyper.algorithm, roll_key)
        memory, batch, prepared = algorithm.prepare(memory, traj, tools, state.hyper.algorithm, prepare_key)
        batch = jax.lax.stop_gradient(batch)
        before = state
        state, updated = update.update(
            algorithm, config.update, score, state, batch, update_key, segments=config.segments, single=tools.single,
            differentiate=differentiate,
        )  # fmt: skip
        # Where every update was refused, so is what the algorithm would have kept of this step.
        refused = (state.updates == before.updates) & (state.skipped > before.skipped)
        memory = jax.tree.map(lambda new, old: jnp.where(refused, old, new), memory, before.memory)
        state = state._replace(memory=memory)
        metrics = _join(rollout_metrics(traj, config.segments, env.spec.members), prepared, updated)
        if algorithm.finish is not keep_state:
            done = algorithm.finish(state, metrics, state.hyper.algorithm)
            state = jax.tree.map(lambda new, old: jnp.where(refused, old, new), done, state)
        return state._replace(step=state.step + 1), metrics

    return step


def _join(*parts: Metrics) -> Metrics:
    """All metrics of a step; adding two of one name up would mix what has nothing in common."""
    names = [name for part in parts for name in part]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the metrics {twice} have two sources in one step: rename those of the algorithm")
    return {name: value for part in parts for name, value in part.items()}


def _score_fn(policy: Policy, codec: Codec, algorithm: Algorithm, config: TrainConfig) -> update.ScoreFn:
    def score(params: dict[str, PyTree], name: str, batch: Batch) -> Any:
        view = algorithm.views[name]
        allowed = jnp.asarray(codec.sampleable)
        return scoring.score(policy, params[view.model], view, batch, allowed=allowed, chunk=config.vocab_chunk)

    return score


def _tools(policy, codec, env, algorithm, config: TrainConfig, state: TrainState, rollout) -> Tools:
    structure = config.update

    groups = config.episodes // config.group_size

    def roll(
        key: Array, call: Array | int = 0, start: Start | None = None, expert: bool = False,
        episodes: int | None = None, group_size: int | None = None, record: bool = False,
    ) -> Trajectory:  # fmt: skip
        episodes = config.episodes if episodes is None else episodes
        slots = min(config.slots or config.episodes, episodes)
        if start is not None and "pairs" in algorithm.needs:
            check_start(start, groups)
        if expert:
            start = (start or Start())._replace(
                teacher_turns=start_for_expert(episodes, env.spec.max_turns).teacher_turns
            )
        return rollout(
            None if expert else policy, codec, env, None if expert else state.params["policy"],
            jax.random.fold_in(key, call), episodes=episodes, slots=slots,
            max_tokens=config.max_tokens, group_size=group_size or config.group_size, env_params=state.hyper.env_params,
            temperature=state.hyper.temperature, start=start, segments=config.segments, version=state.step,
            chunk=config.chunk, feed_rows=config.feed_rows, record=_whole_state if record else None,
            # A rollout of the expert's alone only steps environments: the more at once the better.
            env_rows=slots if expert else config.env_rows,
        )  # fmt: skip

    def score(view: scoring.View, batch: Batch) -> Any:
        _check_model("Tools.score", view, state.params)
        params = jax.lax.stop_gradient(state.params[view.model])
        allowed = jnp.asarray(codec.sampleable)
        return scoring.score(policy, params, view, batch, allowed=allowed, chunk=config.vocab_chunk)

    # Where a stage sets `logp_old` itself (replayed episodes), the update must not put the policy's own in its place.
    single = structure.epochs == structure.minibatches == 1 and "logp_old" not in algorithm.needs
    return Tools(
        roll, score, config.episodes, config.group_size, groups, config.segments, single, config.max_tokens,
        env.spec.max_turns, codec,
    )  # fmt: skip


def _whole_state(state: PyTree) -> PyTree:
    """What ``roll(record=True)`` keeps before every action: enough to go on from there."""
    return state


def rollout_metrics(traj: Trajectory, segments: int = 1, members: tuple[str, ...] = ()) -> Metrics:
    """What episodes were like: reward, every ``info`` name summed over turns, turns, tokens, truncation, cut actions.

    With the ``members`` of a mixture ``success_NAME`` is the success (or return) of the episodes that played each.
    """
    rows = traj.length > 0
    first = rows[::segments]
    per_episode = lambda x: jnp.sum(x.reshape(first.shape[0], -1).astype(jnp.float32), axis=1)  # noqa: E731
    sampled = traj.mask & ~traj.expert
    out = {
        "reward": metrics_lib.masked(per_episode(traj.reward), first),
        "turns": metrics_lib.masked(per_episode(traj.steps["played"]), first),
        "length": metrics_lib.masked(per_episode(traj.length), first),
        "written": metrics_lib.masked(per_episode(traj.mask), first),
        "truncated": metrics_lib.masked(per_episode(traj.truncated), first),
        "cut_actions": (
            jnp.sum(traj.steps["cut"].astype(jnp.float32)),
            jnp.sum((traj.steps["played"] | traj.steps["cut"]).astype(jnp.float32)),
        ),
        "tokens": metrics_lib.scalar(jnp.sum(traj.length)),
        "logp": metrics_lib.masked(traj.logp, sampled),
    }
    if "tool_calls" in traj.steps:
        out["tool_rate"] = metrics_lib.masked((per_episode(traj.steps["tool_calls"]) > 0).astype(jnp.float32), first)
    if members:
        success, member = per_episode(traj.steps.get("success", traj.reward)), played_member(traj.steps, first.shape[0])
        out |= {f"success_{name}": metrics_lib.masked(success, member == i) for i, name in enumerate(members)}
    skip = ("reward", "played", "cut", "anchor", *(("env",) if members else ()))
    return out | {k: metrics_lib.masked(per_episode(v), first) for k, v in traj.steps.items() if k not in skip}


def make_train(
    policy: Policy,
    codec: Codec,
    env: Environment,
    algorithm: Algorithm,
    config: TrainConfig,
    *,
    steps: int,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """``train(key, hyper=None, params=None) -> (state, {name: [steps]})``: a whole run as one pure function.

    Where ``Hyper.decay`` is not given, a schedule runs out with the run's last update.
    """
    updates = steps * config.update.epochs * config.update.minibatches
    init, step = make_init(policy, codec, env, algorithm, config), make_step(policy, codec, env, algorithm, config)

    def train(
        key: Array, hyper: Hyper | None = None, params: PyTree | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        def one(state: TrainState, _: None) -> tuple[TrainState, dict[str, Array]]:
            state, metrics = step(state)
            return state, metrics_lib.finalize(metrics)

        hyper = make_hyper(algorithm, env) if hyper is None else hyper
        if config.update.schedule != "constant":
            hyper = hyper._replace(decay=jnp.where(hyper.decay > 0, hyper.decay, jnp.float32(updates)))
        return jax.lax.scan(one, init(key, hyper, params), None, length=steps)

    return train
