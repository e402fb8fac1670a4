"""Devices change where things are computed, never what: tokens are equal, losses and gradients to 1e-5."""

import functools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import two_process as small
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax import envs, models, parallel, train
from agentrl_jax.rollout import rollout
from agentrl_jax.types import Start
from agentrl_jax.update import UpdateConfig

KEY = jax.random.key(0)
MESHES = {"data": {}, "fsdp": {"fsdp": 2}, "tensor": {"fsdp": 2, "tensor": 2}}


def outcomes(state, step, caplog=None):
    """What every step gives; with ``caplog``, steps after the first must not compile anything."""
    out = []
    for i in range(small.STEPS):
        with jax.log_compiles(caplog is not None and i > 0):
            state, metrics = step(state)
        assert caplog is None or not [r for r in caplog.records if "ompiling" in r.getMessage()]
        out.append(small.outcome(state, metrics))
    return out


@functools.cache
def one_device():
    init = jax.jit(small.init)
    step = train.make_step(small.POLICY, small.CODEC, small.ENV, small.ALGORITHM, small.CONFIG)
    state = init(KEY)
    before = small.outcome(state, {})
    return [before, *outcomes(state, jax.jit(step))]


def assert_equal(found, steps=small.STEPS):
    """Integers and masks exactly; numbers to 1e-5 of the largest; so too every parameter's step, its gradient."""
    before = one_device()[0]
    for i in range(steps):
        expected, got = one_device()[i + 1], found[i]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            if value.dtype.kind in "ib":
                np.testing.assert_array_equal(got[name], value, err_msg=name)
            elif name == "metrics/max_logp_gap":
                assert value < 1e-4 and got[name] < 1e-4
            else:
                scale = max(np.abs(value).max(), 1e-6)
                np.testing.assert_allclose(got[name] / scale, value / scale, rtol=0, atol=1e-5, err_msg=name)
        for name in (n for n in expected if n.startswith("params/")):
            gradient = before[name] - expected[name]
            error = np.abs(before[name] - got[name] - gradient).max()
            assert error <= 1e-5 * np.abs(gradient).max() + 1e-7, (name, error, np.abs(gradient).max())


def test_the_problem_is_ragged():
    """Otherwise equality would say little: a mean of per-device means must differ from the mean."""
    before, first, second = one_device()
    mask = first["mask"].reshape(8, -1)
    assert (mask[:2].sum(axis=1) == 0).all()  # Two of eight devices have nothing to do.
    assert len(set(mask.sum(axis=1))) > 3
    assert not (first["tokens"] == second["tokens"]).all()
    assert all(np.abs(first[n] - before[n]).max() > 1e-4 for n in before if n.startswith("params/"))


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_device(name, caplog):
    mesh = parallel.make_mesh(**MESHES[name])
    state, step = small.mesh_program(mesh)
    assert_equal(outcomes(state, step, caplog))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))  # Donated.


def test_pmap_data_parallel_equals_one_device(caplog):
    step = parallel.pmap_data_parallel(small.POLICY, small.CODEC, small.ENV, small.ALGORITHM, small.CONFIG)
    assert_equal(outcomes(jax.jit(small.init)(KEY), step, caplog))


def test_two_processes_equal_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program, path = Path(small.__file__), tmp_path / "out.npz"
    both = [
        subprocess.Popen(
            [sys.executable, str(program), port, rank, "2", str(path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(errors)
    saved = np.load(path)
    found = [
        {name.partition("/")[2]: saved[name] for name in saved.files if name.startswith(f"{i}/")}
        for i in range(small.STEPS)
    ]
    assert_equal(found)


def jit(f):
    return jax.jit(f)


def player(play, **options):
    """``rollout`` of fresh tasks with everything that crosses the border to the devices."""

    def run(params, key):
        return play(
            small.POLICY, small.CODEC, small.ENV, params, key, episodes=16, slots=8, max_tokens=24, group_size=4,
            segments=3, chunk=8, version=jnp.int32(7), temperature=0.8, record=lambda s: s.bit, top_p=0.95, **options,
        )  # fmt: skip

    return run


def assert_same_rows(found, expected):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        if a.dtype.kind == "f":
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(b, a, err_msg=name)


@functools.cache
def placed_params():
    mesh = parallel.make_mesh(fsdp=2, tensor=2)
    params = jit(small.POLICY.init)(KEY)
    specs = parallel.param_specs(mesh, params)
    sharding = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))
    return mesh, params, jax.device_put(params, sharding)


def test_fresh_tasks_are_those_of_one_device():
    mesh, params, placed = placed_params()
    expected = jit(player(rollout))(params, KEY)
    assert len(set(np.asarray(expected.task))) > 1
    found = jit(player(parallel.sharded_rollout(mesh)))(placed, KEY)
    assert_same_rows(found, expected)
    assert found.tokens.sharding.shard_shape(found.tokens.shape) == (48 // 4, 24)  # Split over data x fsdp.
    assert_same_rows(jit(player(parallel.sharded_rollout(mesh, rollout_mode="lockstep")))(placed, KEY), expected)


def test_a_given_start_is_that_of_one_device():
    """Groups of unequal size, parameters of each episode, and no model: the expert plays."""
    params = envs.probes.Params(reward=jnp.arange(16, dtype=jnp.float32))
    group = jnp.asarray([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4], jnp.int32)
    start = Start(group=group, params=params, teacher_turns=jnp.full(16, 3), temperature=jnp.linspace(0, 1, 16))

    def run(play):
        return jit(
            lambda key: play(
                None, small.CODEC, small.ENV, None, key, episodes=16, slots=8, max_tokens=24, segments=3, start=start
            )
        )(KEY)

    expected, found = run(rollout), run(parallel.sharded_rollout(parallel.make_mesh(fsdp=2)))
    assert_same_rows(found, expected)
    np.testing.assert_array_equal(np.asarray(found.reward).reshape(16, -1).sum(axis=1), np.arange(16))
    np.testing.assert_array_equal(found.group[::3], group)


def collectives(jaxpr, inside=False):
    """Names of collective primitives inside a ``shard_map``, and the axes over which each of those is manual."""
    found, manual = set(), []
    for eqn in jaxpr.eqns:
        here = inside or eqn.primitive.name == "shard_map"
        if eqn.primitive.name == "shard_map":
            manual += [set(axes) for name, axes in eqn.params.items() if name.endswith("manual_axes")]
        if inside and re.match(r"p(sum|max|min|permute|broadcast)|all_|reduce_scatter|axis_index", eqn.primitive.name):
            found.add(eqn.primitive.name)
        for inner in jaxprs_in_params(eqn.params):
            more, axes = collectives(inner, here)
            found, manual = found | more, manual + axes
    return found, manual


def test_no_collective_inside_the_split_rollout():
    """Devices leave the loop at different times: one that still waits for another would wait for ever."""
    mesh, params, _ = placed_params()
    jaxpr = jax.make_jaxpr(player(parallel.sharded_rollout(mesh)))(params, KEY).jaxpr
    assert collectives(jaxpr) == (set(), [set(parallel.AXES)])
    dependent = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    assert collectives(jax.make_jaxpr(dependent)(jnp.ones(8)).jaxpr)[0]  # The search itself finds one.


def test_parameters_are_gathered_in_the_given_dtype():
    mesh, params, _ = placed_params()
    seen = set()

    def watched(params, hidden):
        seen.update(x.dtype.name for x in jax.tree.leaves(params))
        return small.POLICY.logits(params, hidden)

    def run(params, key):
        policy = small.POLICY._replace(logits=watched)
        play = parallel.sharded_rollout(mesh, dtype=jnp.bfloat16)
        return play(policy, small.CODEC, small.ENV, params, key, episodes=8, slots=8, max_tokens=24, segments=3)

    jax.eval_shape(run, params, KEY)
    assert seen == {"bfloat16"}


def abstract_state(**options):
    config = models.TransformerConfig(264, layers=1, width=32, heads=4, kv_heads=2, mlp_width=64, tied=False, **options)
    structure = small.CONFIG._replace(update=UpdateConfig(optimizer="adam"))
    init = train.make_init(models.transformer_policy(config), small.CODEC, small.ENV, small.ALGORITHM, structure)
    return jax.eval_shape(init, KEY)


def test_rules_place_every_leaf():
    mesh = parallel.make_mesh(fsdp=2, tensor=2)
    specs = parallel.param_specs(mesh, abstract_state(value_head=True).params["policy"])
    assert specs == {
        "embedding": P("tensor", "fsdp"),
        "head": P("tensor", "fsdp"),
        "blocks_0": {
            "attention": {"qkv": {"kernel": P("fsdp", "tensor")}, "out": {"kernel": P("tensor", "fsdp")}},
            "feed_forward": {"gate_up": {"kernel": P("fsdp", "tensor")}, "down": {"kernel": P("tensor", "fsdp")}},
            "norm_attention": {"scale": P(None)},
            "norm_feed_forward": {"scale": P(None)},
        },
        "final_norm": {"scale": P(None)},
        "value": {"kernel": P("fsdp", None), "bias": P(None)},
    }
    # FSDP alone takes the largest axis that divides; what does not divide stays whole.
    shapes = {"wide": jnp.zeros((4, 12)), "odd": jnp.zeros((3, 5)), "tall": jnp.zeros((9, 6)), "vector": jnp.zeros(8)}
    specs = parallel.param_specs(parallel.make_mesh(fsdp=2), shapes)
    assert specs == {"wide": P(None, "fsdp"), "odd": P(None, None), "tall": P(None, "fsdp"), "vector": P(None)}
    specs = parallel.param_specs(
        mesh, {"embedding": jnp.zeros((261, 32)), "w": jnp.zeros((4, 4))}, [("w$", P("tensor"))]
    )
    assert specs == {"embedding": P(None, "fsdp"), "w": P("tensor", "fsdp")}


def test_the_optimiser_lies_where_parameters_lie():
    state = abstract_state(value_head=True)
    sharding = parallel.state_sharding(parallel.make_mesh(fsdp=2, tensor=2), state)
    for moments in (sharding.opt_state.mu, sharding.opt_state.nu):
        assert moments == sharding.params
    assert sharding.opt_state.count.spec == sharding.key.spec == sharding.step.spec == P()
    assert jax.tree.structure(sharding) == jax.tree.structure(state)
    # A leaf under a parameter's name but of another shape (factored moments) is replicated.
    factored = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=8).init, state.params)
    odd = parallel.state_sharding(parallel.make_mesh(fsdp=2), state._replace(opt_state=factored)).opt_state
    assert odd.v_row["policy"]["head"].spec == P()


@pytest.mark.parametrize("name", MESHES)
def test_shards_have_the_shape_that_rules_promise(name):
    mesh = parallel.make_mesh(**MESHES[name])
    assert mesh.axis_types == (AxisType.Auto,) * 3 and mesh.axis_names == parallel.AXES
    state = jit(small.init)(KEY)
    placed = parallel.shard_state(state, parallel.state_sharding(mesh, state))
    shape = {"data": (32, 64), "fsdp": (32, 32), "tensor": (16, 32)}[name]
    kernel = placed.params["policy"]["blocks_0"]["attention"]["qkv"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {shape} and len(kernel.addressable_shards) == 8
    assert placed.key.sharding.is_fully_replicated
    for a, b in zip(jax.tree.leaves(placed.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(placed.params)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.params))  # A copy: the original outlives donation.


def test_seeds_are_equal_however_they_are_spread():
    def run(key):
        x = jax.random.normal(key, (4,))
        return {
            "steps": jax.random.randint(key, (), 0, 9),
            "x": jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
        }

    keys = jax.random.split(KEY, 8)
    alone = [run(key) for key in keys]
    for how in ("map", "vmap", "pmap"):
        out = parallel.over_seeds(run, how)(keys)
        np.testing.assert_array_equal(out["steps"], [one["steps"] for one in alone])
        np.testing.assert_allclose(out["x"], [one["x"] for one in alone], rtol=1e-6)
    assert len(out["x"].sharding.device_set) == 8
    with pytest.raises(ValueError, match="map, vmap or pmap, got 'spmd'"):
        parallel.over_seeds(run, "spmd")


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="data=3 x fsdp=2 x tensor=1 needs 6 devices, and there are 8"):
        parallel.make_mesh(data=3, fsdp=2)
    with pytest.raises(ValueError, match="data=2 x fsdp=3 x tensor=1 needs 6"):
        parallel.make_mesh(fsdp=3)
    with pytest.raises(ValueError, match="tensor must be at least 1, got 0"):
        parallel.make_mesh(tensor=0)
    assert parallel.make_mesh(devices=jax.devices()[:2]).shape == {"data": 2, "fsdp": 1, "tensor": 1}


def test_rules_that_do_not_fit_are_refused():
    mesh = parallel.make_mesh(fsdp=2, tensor=2)
    params = {"w": jnp.zeros((4, 4))}
    with pytest.raises(ValueError, match="tensor=2 divides no axis"):
        parallel.param_specs(mesh, params)
    with pytest.raises(ValueError, match="fsdp=2 divides no axis"):
        parallel.param_specs(mesh, {"embedding": jnp.zeros((4, 5))})
    with pytest.raises(ValueError, match="rule for w has 3 axes"):
        parallel.param_specs(mesh, params, [("w", P(None, None, "tensor"))])
    with pytest.raises(ValueError, match="rule for w names \\['model'\\]"):
        parallel.param_specs(mesh, params, [("w", P("model"))])


def test_rollouts_that_do_not_split_are_refused():
    play = parallel.sharded_rollout(parallel.make_mesh())

    def run(play=play, **sizes):
        play(small.POLICY, small.CODEC, small.ENV, {}, KEY, max_tokens=8, **sizes)

    with pytest.raises(ValueError, match=r"episodes \(12\) must be a multiple of the number of devices \(8\)"):
        run(episodes=12, slots=8)
    with pytest.raises(ValueError, match=r"slots \(4\) must be a multiple"):
        run(episodes=16, slots=4)
    with pytest.raises(ValueError, match=r"multiple of group_size \(3\)"):
        run(episodes=16, slots=8, group_size=3)
    with pytest.raises(ValueError, match=r"start.active must have shape \(16,\)"):
        run(episodes=16, slots=8, start=Start(active=jnp.ones(8, bool)))
    with pytest.raises(ValueError, match=r"^temperature must not be negative, got -1\.0"):
        run(episodes=16, slots=8, temperature=-1.0)
    with pytest.raises(ValueError, match=r"start.group must be in \[0, 16\), got 16"):
        run(episodes=16, slots=8, start=Start(group=np.arange(1, 17)))
    with pytest.raises(ValueError, match="'split' or 'lockstep', got 'local'"):
        parallel.sharded_rollout(parallel.make_mesh(), rollout_mode="local")
    config = small.CONFIG._replace(episodes=24, slots=24)
    with pytest.raises(ValueError, match=r"24 units do not split .* on 8 devices: they must be a multiple of 16"):
        parallel.pmap_data_parallel(small.POLICY, small.CODEC, small.ENV, small.ALGORITHM, config)


@pytest.mark.parametrize(
    "given, message",
    [
        (("127.0.0.1:1234",), "together"),
        (("127.0.0.1", 2, 0), "host:port"),
        (("127.0.0.1:99999", 2, 0), "1, 65535"),
        (("127.0.0.1:1234", 2, 2), r"process_id must be in \[0, num_processes = 2\), got 2"),
        (("127.0.0.1:1234", 0, 0), "process_id must be in"),
    ],
)
def test_initialize_refuses_what_cannot_work(given, message):
    with pytest.raises(ValueError, match=message):
        parallel.initialize(*given)
