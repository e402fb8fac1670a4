"""One small training problem with ragged rows, and a program that runs it as one of several processes.

``python two_process.py PORT RANK PROCESSES FILE`` trains two steps over a data x fsdp mesh of all
processes' devices; process 0 writes what came out.
"""

import os
import sys
from pathlib import Path

import fast

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = fast.flags(devices=2)
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import codecs, envs, models, objectives, parallel, stages, train
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithms import make
from agentrl_jax.types import Start
from agentrl_jax.update import UpdateConfig

EPISODES = 16
STEPS = 2
CODEC = codecs.byte()
ENV = envs.make("probe_restart")
CONFIG = train.TrainConfig(
    episodes=EPISODES, group_size=2, slots=8, max_tokens=24, segments=3, chunk=8,
    update=UpdateConfig(microbatches=2, optimizer="sgd"),
)  # fmt: skip
TEACHER_TURNS = np.array([0, 0, 1, 2, 0, 3, 1, 0, 2, 2, 0, 1, 3, 0, 1, 2], np.int32)


def policy(bias=4.0):
    """A transformer that likes to end its actions, so that they differ in length."""
    made = models.transformer_policy(
        models.TransformerConfig(
            vocab_size=CODEC.vocab_size, layers=1, width=32, heads=4, kv_heads=2, mlp_width=64, value_head=True,
            cache_widths=(CONFIG.max_tokens,),
        )
    )  # fmt: skip

    def logits(params, hidden):
        out = made.logits(params, hidden)
        return out + bias * (jnp.arange(out.shape[-1]) == CODEC.end_action)

    return made._replace(logits=logits)


POLICY = policy()


def start():
    """Ragged on purpose: the first four episodes are not played, the others begin with 0 to 3 teacher's turns."""
    return Start(active=jnp.arange(EPISODES) >= 4, teacher_turns=jnp.asarray(TEACHER_TURNS))


def _collect(memory, tools, hyper, key):
    traj = tools.roll(key, start=start())
    return {"tokens": traj.tokens, "logp": traj.logp, "mask": traj.mask, "episode": traj.episode}, traj


def _reward(memory, batch, tools, hyper, key):
    """A reward that differs from token to token, so that every gradient is far from 0."""
    traj = batch.traj
    reward = jnp.where(traj.mask, (traj.tokens % 7).astype(jnp.float32) / 7, 0.0)
    return memory, batch._replace(traj=traj._replace(reward=reward)), {}


def _memory(key, shape):
    rows = EPISODES * CONFIG.segments
    shape = (rows, CONFIG.max_tokens)
    return {
        "tokens": jnp.zeros(shape, jnp.int32), "logp": jnp.zeros(shape), "mask": jnp.zeros(shape, bool),
        "episode": jnp.zeros(rows, jnp.int32),
    }  # fmt: skip


# PPO, since it has statistics over the whole batch (whitening), a value head, and a mean over ragged tokens.
ALGORITHM = make("ppo")._replace(
    init=_memory,
    collect=_collect,
    prepare=stages.chain(_reward, stages.score_policy(always=True), stages.gae(), stages.whiten()),
    weigh=objectives.weigh_tokens("token-mean"),
)


def init(key):
    """With SGD at rate 1 and no clipping, parameters before and after differ by the gradient."""
    hyper = train.make_hyper(ALGORITHM, ENV, learning_rate=1.0, max_grad_norm=1e9)
    return train.make_init(POLICY, CODEC, ENV, ALGORITHM, CONFIG)(key, hyper)


def outcome(state, metrics):
    """Everything that must be equal, as NumPy arrays; copied, since the state may be donated to the next step."""
    out = {**state.memory, "params": state.params, "metrics": metrics_lib.finalize(metrics)}
    flat = jax.tree_util.tree_leaves_with_path(out)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in flat}


def mesh_program(mesh, **options):
    """``(state, step)`` over a mesh; the state is born where it lies."""
    key = jax.random.key(0)
    sharding = parallel.state_sharding(mesh, jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=sharding)(key)
    rollout = parallel.sharded_rollout(mesh, **options)
    step = train.make_step(POLICY, CODEC, ENV, ALGORITHM, CONFIG, rollout=rollout)
    return state, parallel.jit_step(step, mesh, sharding)


def main(port, rank, processes, path):
    parallel.initialize(f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=60)
    mesh = parallel.make_mesh(data=int(processes), fsdp=2)
    state, step = mesh_program(mesh)
    gather = jax.jit(lambda s: s, out_shardings=jax.NamedSharding(mesh, jax.P()))
    saved = {}
    for i in range(STEPS):
        state, metrics = step(state)
        whole = gather(state._replace(key=jax.random.key_data(state.key)))
        saved |= {f"{i}/{name}": value for name, value in outcome(whole, metrics).items()}
    if rank == "0":
        np.savez(Path(path), **saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
