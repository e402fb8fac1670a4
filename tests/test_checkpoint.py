"""Checkpoints: bit-exact, atomic under kill -9, verified, and never a way to run code or leave the directory."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax import manifest
from agentrl_jax.checkpoint import Checkpoints, best, latest, read_metadata, restore, steps
from agentrl_jax.files import dumps, loads, safe_child, write_atomic
from agentrl_jax.manifest import CheckpointError, scan


class State(NamedTuple):
    step: jax.Array
    params: dict
    key: jax.Array
    extra: tuple


def make_state(step=0):
    return State(
        step=jnp.asarray(step, jnp.int32),
        params={
            "a/b": jnp.linspace(0, 1, 6, dtype=jnp.bfloat16).reshape(2, 3),
            "a.b": jnp.full((4,), step, jnp.float32),
            "empty": jnp.zeros((0, 3), jnp.uint8),
            "odd": jnp.asarray([np.nan, -0.0, np.inf, 1e-42], jnp.float32),
            "mask": jnp.asarray([True, False]),
        },
        key=jax.random.key(42),
        extra=(
            jax.random.split(jax.random.key(1), 3).reshape(1, 3),
            jax.random.key(7, impl="rbg"),
            jax.random.PRNGKey(3),
            np.arange(3, dtype=np.int64) + 2**40,
            np.float32(0.1),
            5,
            0.1,
            True,
            None,
        ),
    )


def raw(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
        assert np.shape(x) == np.shape(y)
        assert raw(x) == raw(y)


def small(step):
    return {"w": jnp.full((3,), step, jnp.float32), "key": jax.random.key(step)}


def fill(directory, wanted, **options):
    with Checkpoints(directory, **{"keep_last": -1, **options}) as manager:
        for step in wanted:
            manager.save(step, small(step), {"note": step}, {"success": float(-abs(step - 10))})


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def array_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"), key=size)


def size(path: Path) -> int:
    return path.stat().st_size


def rewrite(folder: Path, change):
    """Changes a manifest and seals it again, as an attacker would."""
    body = loads((folder / "manifest.json").read_text())["body"]
    change(body)
    write_atomic(folder / "manifest.json", dumps({"checksum": manifest._digest(body), "body": body}))


def test_round_trip_is_bit_exact(tmp_path):
    state = make_state(3)
    metadata = {"config": {"lr": 1e-3, "clip": float("inf"), "shape": (2, 3)}, "codec": "byte"}
    with Checkpoints(tmp_path) as manager:
        manager.save(3, state, metadata, wait=True)
        out = manager.restore(state)
    assert out.step == 3
    assert out.metadata == metadata == read_metadata(tmp_path, 3)
    assert_same(out.state, state)
    arrays = State(state.step, state.params, state.key, state.extra[:3])
    with Checkpoints(tmp_path / "abstract") as manager:
        manager.save(0, arrays, wait=True)
        assert_same(manager.restore(jax.eval_shape(lambda: arrays)).state, arrays)


def test_a_relative_folder_is_as_good_as_an_absolute_one(tmp_path, monkeypatch):
    """A run's folder is `runs/NAME` to whoever types it."""
    monkeypatch.chdir(tmp_path)
    state = make_state(3)
    with Checkpoints(Path("runs/a")) as manager:
        manager.save(3, state, {}, wait=True)
    assert_same(restore(Path("runs/a"), state).state, state)
    assert_same(restore(tmp_path / "runs" / "a", state).state, state)


def test_restores_in_another_process(tmp_path):
    """P46: typed keys of several shapes and implementations come back with dtype, implementation and stream."""
    state = {
        "one": jax.random.key(42),
        "three": jax.random.split(jax.random.key(0), 3),
        "rbg": jax.random.key(7, impl="rbg"),
    }
    with Checkpoints(tmp_path) as manager:
        manager.save(1, state)
    code = """
import sys, jax, numpy as np
from agentrl_jax.checkpoint import restore
key = jax.random.key
make = lambda: {"one": key(0), "three": jax.random.split(key(0), 3), "rbg": key(0, impl="rbg")}
out = restore(sys.argv[1], jax.eval_shape(make)).state
for name, key in sorted(out.items()):
    print(key.dtype, jax.random.key_impl(key), np.asarray(jax.random.uniform(key.reshape(-1)[0], (4,))).tobytes().hex(),
          np.asarray(jax.random.key_data(jax.random.split(key.reshape(-1)[0]))).tobytes().hex())
"""
    lines = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for line, (_, key) in zip(lines, sorted(state.items()), strict=True):
        one = key.reshape(-1)[0]
        expected = [str(key.dtype), str(jax.random.key_impl(key)), raw(jax.random.uniform(one, (4,))).hex()]
        assert line.split(" ") == [*expected, raw(jax.random.split(one)).hex()]


def test_donated_buffers_are_safe(tmp_path):
    bump = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = {"w": jnp.arange(1000.0)}
    expected = {"w": np.arange(1000.0, dtype=np.float32)}
    with Checkpoints(tmp_path) as manager:
        manager.save(0, state)
        state = bump(state)
        restored = manager.restore(jax.eval_shape(lambda: state)).state
    np.testing.assert_array_equal(restored["w"], expected["w"])
    np.testing.assert_array_equal(bump(restored)["w"], expected["w"] + 1)  # Restored buffers can be donated too.


def test_restores_onto_shardings(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec("data", "model"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = {
        "w": jax.device_put(jnp.arange(32.0).reshape(8, 4), spread),
        "key": jax.device_put(jax.random.key(1), everywhere),
    }
    with Checkpoints(tmp_path) as manager:
        manager.save(0, state)
    other = NamedSharding(mesh, PartitionSpec("model", None))
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other),
        "key": jax.ShapeDtypeStruct((), state["key"].dtype, sharding=everywhere),
    }
    out = restore(tmp_path, wanted).state
    assert out["w"].sharding == other
    assert out["key"].sharding.is_equivalent_to(everywhere, 0)
    assert raw(out["w"]) == raw(state["w"])
    assert raw(out["key"]) == raw(state["key"])
    assert restore(tmp_path, state).state["w"].sharding == spread
    assert not restore(tmp_path, {"w": jnp.zeros((8, 4)), "key": jax.random.key(0)}).state["w"].committed


def test_discovery_is_numeric_and_skips_strays(tmp_path):
    """P48: numbers, not strings; zero padding; unrelated, empty, incomplete and linked folders."""
    fill(tmp_path, [9, 10, 100])
    os.rename(tmp_path / "step_100", tmp_path / "0000100")
    (tmp_path / "best").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert steps(tmp_path) == [9, 10, 100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) == 100
    (tmp_path / "step_200").mkdir()
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_300", ignore=shutil.ignore_patterns("manifest.json"))
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_400")
    (tmp_path / "step_500").symlink_to(tmp_path / "step_10")
    (tmp_path / "step_600").write_text("a file")
    assert steps(tmp_path) == [9, 10, 100]
    assert [skip.path.name for skip in scan(tmp_path).skipped] == [f"step_{n}00" for n in (2, 3, 4, 5, 6)]
    with pytest.warns(UserWarning, match="skipped a checkpoint") as record:
        out = restore(tmp_path, small(0))
    assert len(record) == 5
    assert out.step == 100
    assert_same(out.state, small(100))


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest", "half manifest"])
def test_damage_is_detected_and_the_previous_one_is_used(tmp_path, damage):
    fill(tmp_path, [10, 11])
    folder = tmp_path / "step_11"
    target = folder / "manifest.json" if "manifest" in damage else array_file(folder)
    if damage in ("truncate", "half manifest"):
        os.truncate(target, size(target) // 2)
    elif damage == "delete":
        target.unlink()
    else:
        flip(target)
    with pytest.warns(UserWarning, match="step_11"):
        assert latest(tmp_path) == 10
    with pytest.warns(UserWarning, match="step_11"):
        assert_same(restore(tmp_path, small(0)).state, small(10))
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match=r"looked for step_11, usable are \[10\]"):
        restore(tmp_path, small(0), 11)
    with Checkpoints(tmp_path) as manager:  # The damaged folder does not stand in the way of saving again.
        manager.save(11, small(11), wait=True)
    assert latest(tmp_path) == 11


def test_retention(tmp_path):
    for bad in (0, -2):
        with pytest.raises(ValueError, match=f"keep_last is {bad}"):
            Checkpoints(tmp_path, keep_last=bad)
    with pytest.raises(ValueError, match="keep_best is -1"):
        Checkpoints(tmp_path, keep_best=-1)
    with pytest.raises(ValueError, match="allowed are 'max' and 'min'"):
        Checkpoints(tmp_path, mode="most")
    fill(tmp_path / "all", range(8, 14))
    assert steps(tmp_path / "all") == [8, 9, 10, 11, 12, 13]
    fill(tmp_path / "two", range(8, 14), keep_last=2, metric="success")
    assert steps(tmp_path / "two") == [10, 12, 13]
    assert best(tmp_path / "two", "success") == 10
    assert best(tmp_path / "two", "success", "min") == 13
    assert best(tmp_path / "two", "unknown") is None
    fill(tmp_path / "one", range(8, 14), keep_last=1)
    assert steps(tmp_path / "one") == [13]


def test_retention_counts_only_complete_ones_and_spares_strays(tmp_path):
    fill(tmp_path, [5])
    (tmp_path / "step_90").mkdir()
    (tmp_path / "step_91").mkdir()
    fill(tmp_path, [6], keep_last=1)
    assert steps(tmp_path) == [6]
    assert (tmp_path / "step_90").is_dir()
    fill(tmp_path, [3], keep_last=1)  # An older step saved after a newer one: what was just written stays.
    assert 3 in steps(tmp_path)


def test_not_a_number_is_never_best(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, metric="reward") as manager:
        for step, reward in enumerate([0.5, float("nan"), float("inf"), 0.25]):
            manager.save(step, small(step), metrics={"reward": reward})
    assert best(tmp_path, "reward") == 0
    assert steps(tmp_path) == [0, 3]


def test_saving_a_step_again_never_leaves_none(tmp_path, monkeypatch):
    """P48: at every rename and removal there is a complete checkpoint of the step."""
    fill(tmp_path, [4], keep_last=1)
    seen = []
    rename = os.rename

    def watched(source, target):
        seen.append(steps(tmp_path))
        rename(source, target)
        seen.append(steps(tmp_path))

    monkeypatch.setattr(os, "rename", watched)
    with Checkpoints(tmp_path, keep_last=1) as manager:
        manager.save(4, {"w": jnp.ones(2)}, wait=True)
        manager.save(4, {"w": jnp.ones(2) * 2}, wait=True)
    assert len(seen) >= 8  # Published and removed, twice; the storage renames too.
    assert all(found == [4] for found in seen)
    assert restore(tmp_path, {"w": jnp.zeros(2)}).state["w"].tolist() == [2.0, 2.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_save_is_reported_and_harmless(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as manager:
        manager.save(1, small(1), wait=True)
        monkeypatch.setattr("agentrl_jax.checkpoint.seal", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
        manager.save(2, small(2))
        with pytest.raises(CheckpointError, match="disk full"):
            manager.wait()
        monkeypatch.undo()
        manager.save(3, small(3))
    assert steps(tmp_path) == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]


KILLED = """
import sys, jax, jax.numpy as jnp
from agentrl_jax.checkpoint import Checkpoints, latest
first = (latest(sys.argv[1]) or 0) + 1
with Checkpoints(sys.argv[1], keep_last=2) as manager:
    print("ready", flush=True)
    for step in range(first, 100000):
        state = {"step": jnp.asarray(step), "w": jnp.full((64, 64), step, jnp.float32), "key": jax.random.key(step)}
        manager.save(step, state)
"""


def test_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    random = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: {"step": jnp.asarray(0), "w": jnp.zeros((64, 64)), "key": jax.random.key(0)})
    previous = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while (max(steps(tmp_path), default=0) <= previous) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Nothing half-written carries a checkpoint's name.
            step, state, _ = restore(tmp_path, abstract)
        assert step > previous
        assert int(state["step"]) == step
        assert raw(state["w"]) == np.full((64, 64), step, np.float32).tobytes()
        assert raw(state["key"]) == raw(jax.random.key(step))
        previous = step
    Checkpoints(tmp_path).close()
    assert all(path.name.startswith("step_") for path in tmp_path.iterdir())


def test_mismatch_names_the_first_paths(tmp_path):
    fill(tmp_path, [1])
    cases = [
        (
            {"w": jnp.zeros(4), "key": jax.random.key(0)},
            r"\['w'\]: expected array float32\[4\], found array float32\[3\]",
        ),
        ({"w": jnp.zeros(3, jnp.int32), "key": jax.random.key(0)}, r"expected array int32\[3\], found array float32"),
        ({"w": jnp.zeros(3), "key": jax.random.key(0, impl="rbg")}, r"expected key rbg\[\], found key \S*threefry|fry"),
        ({"w": jnp.zeros(3), "key": jax.random.PRNGKey(0)}, r"\['key'\]: expected array uint32\[2\], found key"),
        (
            {"v": jnp.zeros(3), "key": jax.random.key(0)},
            r"\['v'\]: expected array float32\[3\], found nothing\n.*\['w'\]: found",
        ),
        ([1.0], r"\[0\]: expected float float64\[\], found nothing"),
    ]
    for wanted, message in cases:
        with pytest.raises(CheckpointError, match=message):
            restore(tmp_path, wanted)
    with pytest.raises(CheckpointError, match="and 7 more"):
        restore(tmp_path, {str(i): jnp.zeros(()) for i in range(10)})


def test_missing_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no/such' does not exist"):
        restore(tmp_path / "no" / "such", small(0))
    with pytest.raises(CheckpointError, match=r"looked for step_<n> folders, usable are \[\]"):
        restore(tmp_path, small(0))
    fill(tmp_path, [1])
    with pytest.raises(CheckpointError, match=r"looked for step_7, usable are \[1\]"):
        read_metadata(tmp_path, 7)
    assert latest(tmp_path / "no") is None
    assert steps(tmp_path / "no") == []


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with Checkpoints(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"\['a'\] is a str"):
            manager.save(0, {"a": "text"})
        with pytest.raises(CheckpointError, match=r"\['a'\] is a ndarray object"):
            manager.save(0, {"a": np.array([{}], object)})
        with pytest.raises(CheckpointError, match="does not fit 64 bits"):
            manager.save(0, {"a": 2**70})
        with pytest.raises(TypeError, match=r"value\['f'\] is a function"):
            manager.save(0, {"a": 1}, {"f": lambda: None})
        with pytest.raises(ValueError, match="step is -1"):
            manager.save(-1, {"a": 1})
        with pytest.raises(ValueError, match="step is True"):
            manager.save(True, {"a": 1})
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("reseal", [False, True])
@pytest.mark.parametrize("victim", ["manifest", "array", "every array"])
def test_nothing_is_unpickled(tmp_path, victim, reseal):
    """P58: a pickle in place of any file raises, and leaves no trace of having run."""
    fill(tmp_path, [1])
    sentinel = tmp_path / "sentinel"
    folder = tmp_path / "step_1"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    chosen = {"manifest": [folder / "manifest.json"], "array": [array_file(folder)], "every array": files}[victim]
    for path in chosen:
        path.write_bytes(pickle.dumps(Bomb(sentinel)))
    if reseal and victim != "manifest":
        rewrite(folder, lambda body: body.update(files=manifest._digests(folder)))
    with warnings.catch_warnings(), pytest.raises(CheckpointError):
        warnings.simplefilter("ignore", UserWarning)
        restore(tmp_path, small(0))
    assert not sentinel.exists()
    source = "".join(path.read_text() for path in Path(manifest.__file__).parent.glob("*.py"))
    assert not any(word in source for word in ("import pickle", "allow_pickle=True", "import dill", " eval(", "joblib"))


def test_huge_shape_fails_before_allocation(tmp_path):
    """P58: a manifest that claims 1e12 elements is refused, against any abstract state, without the memory."""
    fill(tmp_path, [1])
    rewrite(tmp_path / "step_1", lambda body: body["leaves"][1].update(shape=[10**12]))
    with pytest.raises(CheckpointError, match=r"found array float32\[1000000000000\]"):
        restore(tmp_path, small(0))
    wanted = {"w": jax.ShapeDtypeStruct((10**12,), jnp.float32), "key": jax.random.key(0)}
    with pytest.raises(CheckpointError, match="its manifest says array float32"):
        restore(tmp_path, wanted)


def test_names_stay_inside(tmp_path):
    """P58: components, not string prefixes."""
    root = tmp_path / "ckpt"
    root.mkdir()
    (tmp_path / "ckpt2" / "x").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "ckpt2")
    for name in [
        "../../etc/x",
        "/etc/x",
        "a/../../b",
        "../ckpt2/x",
        "link/x",
        "link",
        "a\0b",
        "",
        " ",
        ".",
        "..",
        "a//b",
        "a\\b",
    ]:
        with pytest.raises(ValueError, match=r"name|outside"):
            safe_child(root, name)
    assert safe_child(root, "step_10") == root / "step_10"
    assert safe_child(root, "a/b") == root / "a" / "b"
    fill(root, [1])
    rewrite(root / "step_1", lambda body: body["files"].update({"../../ckpt2/x": {"size": 1, "sha256": ""}}))
    with pytest.warns(UserWarning, match="unsafe file"):
        assert latest(root) is None


def test_foreign_manifest_is_refused(tmp_path):
    fill(tmp_path, [1, 2, 3])
    rewrite(tmp_path / "step_2", lambda body: body.update(version=99))
    rewrite(tmp_path / "step_3", lambda body: body.pop("leaves"))
    reasons = [skip.reason for skip in scan(tmp_path).skipped]
    assert "this version reads" in reasons[0]
    assert "not a checkpoint manifest" in reasons[1]
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4" / "manifest.json").write_text("[" * 100000)
    assert "not a checkpoint manifest" in scan(tmp_path).skipped[-1].reason
    assert json.loads((tmp_path / "step_1" / "manifest.json").read_text())["body"]["step"] == 1


TOGETHER = """
import os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from agentrl_jax.checkpoint import Checkpoints, steps
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
make = lambda: {"w": jnp.arange(8.0), "r": jnp.ones(3, jnp.bfloat16), "key": jax.random.key(3)}
state = jax.jit(make, out_shardings={"w": spread, "r": everywhere, "key": everywhere})()
with Checkpoints(sys.argv[3], keep_last=2) as manager:
    for step in range(3):
        manager.save(step, state, {"step": step})
    out = manager.restore(state)
assert (out.step, out.metadata, steps(sys.argv[3])) == (2, {"step": 2}, [1, 2])
assert all(out.state[name].sharding == state[name].sharding for name in state)
for name in ("w", "r"):
    for new, old in zip(out.state[name].addressable_shards, state[name].addressable_shards, strict=True):
        assert new.data.tolist() == old.data.tolist()
assert jax.random.key_data(out.state["key"]).addressable_data(0).tolist() == [0, 3]
"""


def test_two_processes_write_one_checkpoint(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    both = [
        subprocess.Popen([sys.executable, "-c", TOGETHER, port, rank, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(errors)
    whole = restore(tmp_path, {"w": jnp.zeros(8), "r": jnp.zeros(3, jnp.bfloat16), "key": jax.random.key(0)}).state
    assert whole["w"].tolist() == list(range(8))  # One process reads what two have written.
