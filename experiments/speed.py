"""Measures what a step costs, and of what: one JSON line a measurement, compile time and steady state apart.

Workloads (``--work``), all with random weights, one on-policy GRPO step of prompts_per_step x group_size episodes:

* ``single``: a prompt of prompt_len tokens and exactly completion_len sampled ones;
* ``tool``: a calculator conversation of ``--turns`` actions of exactly ``--turn_len`` tokens, 6 tokens of tool
answer between;
* ``heavy``: completion lengths exponential with mean completion_len / 4 (every token may end the action with the same
  probability), cut at completion_len; ``--episodes_per_slot`` episodes flow through each slot;
* ``env``: the real calculator's ``step`` alone;
* ``matmul``: this machine's float32 rate on the update's own matrix shapes, the yardstick of the others;
* ``seeds``: the cost of a training seed under map, vmap and pmap.

Numbers to trust are ratios within one run of this program: the machine's speed drifts.
"""

from __future__ import annotations

import functools
import json
import math
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

from agentrl_jax import algorithms, codecs, envs, metrics, parallel, text, train
from agentrl_jax.envs.base import Environment, EnvSpec
from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.rollout import rollout_with_stats
from agentrl_jax.types import TimeStep
from agentrl_jax.update import UpdateConfig

WORK = ("single", "tool", "heavy", "env", "matmul", "seeds")
TOOL_TOKENS = 6

flags.DEFINE_multi_enum("work", list(WORK), WORK, "What to measure; repeat the flag for several.")
flags.DEFINE_integer("layers", 4, "Transformer blocks.", 1)
flags.DEFINE_integer("d_model", 256, "Width of the residual stream.", 1)
flags.DEFINE_integer("heads", 4, "Query heads.", 1)
flags.DEFINE_integer("kv_heads", 4, "Key and value heads.", 1)
flags.DEFINE_integer("d_ff", 1024, "Inner width of the feed-forward.", 1)
flags.DEFINE_integer("vocab", 512, "Vocabulary.", 264)
flags.DEFINE_integer("prompt_len", 32, "Tokens of a prompt.", 4)
flags.DEFINE_integer("completion_len", 64, "Tokens of a completion.", 2)
flags.DEFINE_integer("turns", 3, "Actions of a tool conversation.", 1)
flags.DEFINE_integer("turn_len", 21, "Tokens of one of its actions.", 2)
flags.DEFINE_integer("prompts_per_step", 16, "Groups in a step.", 1)
flags.DEFINE_integer("group_size", 8, "Episodes of a group.", 2)
flags.DEFINE_integer("episodes_per_slot", 8, "Episodes that flow through a slot in the heavy-tailed workload.", 1)
flags.DEFINE_integer(
    "microbatches",
    0,
    "Pieces the update is computed in; 0: 8 on a CPU, where a piece then stays in its caches, else 1.",
    0,
)
flags.DEFINE_integer("cpu_devices", 2, "CPU devices over which the whole step is also spread by pmap; 1: it is not.", 1)
flags.DEFINE_integer("steps", 6, "Measured repetitions, after one that compiles.", 2)
flags.DEFINE_integer("seeds", 4, "Seeds of the seeds workload.", 1)
flags.DEFINE_integer("seed", 0, "Root seed.")
flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16"], "Activations; parameters stay float32.")
FLAGS = flags.FLAGS


class Talk(NamedTuple):
    """State of the benchmark environment: the last action's bytes decide the tool's answer."""

    turn: jax.Array


def talk(prompt: int, turns: int, tokens: int) -> Environment:
    """A conversation with a calculator that reads any action as a call: ``turns`` actions of ``tokens`` tokens."""

    def observe(value: jax.Array) -> text.Text:
        digits = value // jnp.asarray([1000, 100, 10, 1], jnp.int32) % 10 + ord("0")
        return text.resize(text.Text(digits.astype(jnp.uint8), jnp.int32(4)), prompt)[0]

    def reset(key, params):
        del params
        data = jax.random.randint(key, (prompt,), 97, 123).astype(jnp.uint8)
        return Talk(jnp.int32(0)), TimeStep(observation=text.Text(data, jnp.int32(prompt)))

    def step(key, state, action, params):
        del key, params
        a, b = jnp.sum(action.data[::2].astype(jnp.int32)), jnp.sum(action.data[1::2].astype(jnp.int32))
        value = (a * b) % 10_000
        reward = (value % 10 == 7).astype(jnp.float32)
        last = state.turn + 1 >= turns
        return Talk(state.turn + 1), TimeStep(observation=observe(value), reward=reward, terminated=last)

    spec = EnvSpec(max_observation=prompt, max_action=tokens - 1, max_turns=turns, info=())
    return Environment("talk", "1", spec, (), reset, step)


class Setup(NamedTuple):
    """One workload, ready to be compiled."""

    policy: Any
    codec: Any
    env: Environment
    config: train.TrainConfig


def setup(work: str) -> Setup:
    """The workload's environment, model and sizes."""
    c = FLAGS
    prompt = c.prompt_len - 3  # start, and the openings of the two turns
    turns, tokens = (c.turns, c.turn_len) if work == "tool" else (1, c.completion_len)
    env = talk(prompt, turns, tokens)
    codec = codecs.byte(c.vocab)
    width = c.prompt_len + turns * tokens + (turns - 1) * TOOL_TOKENS
    model = TransformerConfig(
        vocab_size=c.vocab, layers=c.layers, width=c.d_model, heads=c.heads, kv_heads=c.kv_heads, mlp_width=c.d_ff,
        dtype=c.precision,
    )  # fmt: skip
    policy = transformer_policy(model)
    if work == "heavy":
        policy = hazard(policy, codec.end_action, 4.0 / c.completion_len)
    else:
        allowed = list(codec.sampleable)
        allowed[codec.end_action] = False
        codec = codec._replace(sampleable=tuple(allowed))
    slots = c.prompts_per_step * c.group_size
    episodes = slots * (c.episodes_per_slot if work == "heavy" else 1)
    most = 8 if jax.default_backend() == "cpu" else 1
    pieces = c.microbatches or math.gcd(most, c.prompts_per_step * c.group_size // jax.device_count())
    quarters = (c.prompt_len + c.completion_len // 4, c.prompt_len + c.completion_len // 2)
    structure = UpdateConfig(
        microbatches=pieces * (c.episodes_per_slot if work == "heavy" else 1),
        widths=quarters if work == "heavy" else (),
    )
    config = train.TrainConfig(
        episodes=episodes, group_size=c.group_size, slots=slots, max_tokens=width, update=structure
    )
    return Setup(policy, codec, env, config)


def hazard(policy: Any, token: int, probability: float) -> Any:
    """The policy with a constant probability of writing ``token``: geometric, and nearly exponential, lengths."""

    def logits(params, hidden):
        x = policy.logits(params, hidden)
        others = jnp.arange(x.shape[-1]) != token
        rest = jax.nn.logsumexp(
            jnp.where(others & (jnp.arange(x.shape[-1]) < 256), x, -jnp.inf), axis=-1, keepdims=True
        )
        return jnp.where(others, x, rest + jnp.log(probability / (1 - probability)))

    return policy._replace(logits=logits)


class Clocked(NamedTuple):
    """Seconds of the first call, of the others (wall, and CPU of all threads), and the last result."""

    first: float
    wall: list[float]
    cpu: list[float]
    out: Any


def clock(f: Callable, *args: Any, repeats: int | None = None) -> Clocked:
    """Calls ``f`` once to compile it and then ``repeats`` times. CPU seconds are steadier on a busy machine."""
    wall, cpu, out = [], [], None
    for _ in range(1 + (repeats or FLAGS.steps)):
        start, used = time.perf_counter(), time.process_time()
        out = jax.block_until_ready(f(*args))
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return Clocked(wall[0], wall[1:], cpu[1:], out)


def report(**row: Any) -> None:
    """Prints one measurement."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} | {"peak_mb_so_far": round(memory)}
        )
    )


def gflop(lengths: float, squares: float, sampled: float) -> tuple[float, float]:
    """Useful matmul work of rollout and update, from summed lengths, summed squared lengths and sampled tokens."""
    c = FLAGS
    head_dim = c.d_model // c.heads
    dense = 2 * c.layers * (c.d_model * head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.d_model * c.d_ff)
    forward = lengths * dense + sampled * 2 * c.d_model * c.vocab + c.layers * 2 * c.d_model * squares
    return forward / 1e9, 3 * forward / 1e9


@functools.cache
def matmul_rate() -> float:
    """GFLOP/s of this machine on the update's own matrix products, forward and backward shapes, weighed by their
    work."""
    c = FLAGS
    rows = c.prompts_per_step * c.group_size * (c.prompt_len + c.completion_len)
    shapes = [(c.d_model, 3 * c.d_model), (c.d_model, c.d_model), (c.d_model, 2 * c.d_ff), (c.d_ff, c.d_model)]
    work = total = 0.0
    for n, (k, m) in enumerate(shapes):
        key = jax.random.key(n)
        x, w, y = (jax.random.normal(key, s) for s in ((rows, k), (k, m), (rows, m)))
        f = jax.jit(lambda x, w, y: (x @ w, y @ w.T, x.T @ y))
        work += 3 * 2 * rows * k * m / 1e9
        total += min(clock(f, x, w, y).wall)
    return work / total


def step_work(work: str) -> None:
    """A whole step, its two halves as programs of their own, and the step spread over the devices by pmap."""
    s = setup(work)
    algorithm = algorithms.make("grpo")
    hyper = train.make_hyper(algorithm, s.env, learning_rate=1e-4)
    args = (s.policy, s.codec, s.env, algorithm, s.config)
    state = jax.jit(train.make_init(*args))(jax.random.key(FLAGS.seed), hyper)
    step = jax.jit(train.make_step(*args))

    def only_roll(state):
        return rollout_with_stats(
            s.policy, s.codec, s.env, state.params["policy"], state.key, episodes=s.config.episodes,
            slots=s.config.slots, max_tokens=s.config.max_tokens, group_size=s.config.group_size,
        )  # fmt: skip

    roll = clock(jax.jit(only_roll), state)
    traj, stats = roll.out
    learn = clock(jax.jit(train.make_step(*args, rollout=lambda *a, **k: traj)), state)
    whole = clock(step, state)
    spread = clock(parallel.pmap_data_parallel(*args), state) if jax.device_count() > 1 else whole
    length = traj.length.astype(jnp.float32)
    useful, sampled = float(jnp.sum(length)), float(jnp.sum(traj.mask))
    work_roll, work_learn = gflop(useful, float(jnp.sum(length**2)), sampled)
    step_s, roll_s, learn_s = (statistics.median(x.wall) for x in (whole, roll, learn))
    step_cpu, roll_cpu, learn_cpu = (statistics.median(x.cpu) for x in (whole, roll, learn))
    report(
        work=work, params=sum(x.size for x in jax.tree.leaves(state.params["policy"])), episodes=s.config.episodes,
        step_s=step_s, rollout_s=roll_s, update_s=learn_s, fused_over_parts=step_s / (roll_s + learn_s),
        devices=jax.device_count(), spread_step_s=statistics.median(spread.wall), spread_first_call_s=spread.first,
        step_cpu_s=step_cpu, rollout_cpu_s=roll_cpu, update_cpu_s=learn_cpu,
        first_call_s=whole.first, rollout_first_call_s=roll.first,
        rollout_tokens_s=sampled / roll_s, update_tokens_s=useful / learn_s, tokens_s=sampled / step_s,
        rollout_gflops=work_roll / roll_s, update_gflops=work_learn / learn_s, step_gflop=work_roll + work_learn,
        matmul_gflops=matmul_rate(), update_share_of_matmul=work_learn / learn_s / matmul_rate(),
        iterations=int(stats.iterations), slot_use=float(stats.decoded) / (int(stats.iterations) * s.config.slots),
        env_steps=int(stats.steps), mean_length=useful / s.config.episodes,
        logp_gap=float(metrics.finalize(whole.out[1])["max_logp_gap"]),
        precision=FLAGS.precision, compiled_programs=step._cache_size(),
    )  # fmt: skip


def env_work() -> None:
    """Steps of the real calculator, its own expert's words as actions, on many rows at once."""
    env = envs.make("calculator")
    rows = FLAGS.prompts_per_step * FLAGS.group_size
    keys = jax.random.split(jax.random.key(FLAGS.seed), rows)
    state, _ = jax.jit(jax.vmap(env.reset, (0, None)))(keys, env.params)
    action = jax.jit(jax.vmap(env.expert, (0, 0, None)))(keys, state, env.params)
    found = clock(jax.jit(jax.vmap(env.step, (0, 0, 0, None))), keys, state, action, env.params)
    report(work="env", rows=rows, steps_s=rows / statistics.median(found.wall), first_call_s=found.first)


def seeds_work() -> None:
    """Seconds a seed and step, seeds mapped, vmapped and pmapped."""
    s = setup("single")
    algorithm = algorithms.make("grpo")
    run = train.make_train(s.policy, s.codec, s.env, algorithm, s.config, steps=2)
    for how in ("map", "vmap", "pmap"):
        count = FLAGS.seeds if how != "pmap" else jax.local_device_count()
        keys = jax.random.split(jax.random.key(FLAGS.seed), count)
        found = clock(parallel.over_seeds(run, how), keys, repeats=2)
        each = statistics.median(found.wall) / count / 2
        report(
            work="seeds",
            how=how,
            seeds=count,
            devices=jax.local_device_count(),
            seed_step_s=each,
            first_call_s=found.first,
        )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}; workloads are chosen with --work, one of {WORK}")
    # Takes effect where it comes before the first use of a device, and on CPUs alone.
    jax.config.update("jax_num_cpu_devices", FLAGS.cpu_devices)
    for work in FLAGS.work:
        if work == "env":
            env_work()
        elif work == "seeds":
            seeds_work()
        elif work == "matmul":
            report(work="matmul", gflops=matmul_rate())
        else:
            step_work(work)


if __name__ == "__main__":
    app.run(main)
