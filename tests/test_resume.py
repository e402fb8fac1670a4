"""A run that is killed, stopped or damaged goes on as if nothing had happened: the same bits, no step twice."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import fast
import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from agentrl_jax import checkpoint

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import train as training  # noqa: E402

SUPERVISED, RL = 24, 12
TINY = (
    "--env=probe_observation", "--held_out=0", "--layers=1", "--width=16", "--heads=2", "--mlp_width=32",
    f"--supervised_steps={SUPERVISED}", "--supervised_episodes=8", f"--steps={RL}", "--episodes=16", "--group_size=4",
    "--eval_every=4", "--eval_problems=8", "--eval_samples=2", "--save_every=5", "--keep_last=4", "--progress=off",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """``(root, cache)``; in ``root`` lies ``whole``, a run that nothing disturbed."""
    root, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    process = launch((root, cache), "whole")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return root, cache


def launch(place, name, *arguments):
    root, cache = place
    command = [sys.executable, str(EXPERIMENTS / "train.py"), f"--root={root}", f"--name={name}", "--resume"]
    fresh = () if (root / name / "config.json").exists() else TINY
    env = {**os.environ, "XLA_FLAGS": fast.XLA_FLAGS, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*command, f"--compile_cache={cache}", *fresh, *arguments],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_rows(process, directory, rows):
    """Returns when the metrics have so many rows, or the process is over."""
    path = directory / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= rows:
            return
        time.sleep(0.002)


def state_and_rows(root, name):
    """The newest checkpoint as bytes by leaf, and the metrics without times."""
    setup, directory, _ = training.open_run({"root": str(root), "name": name, "resume": True})
    restored = checkpoint.restore(directory / "checkpoints", setup.abstract(setup.phases[-1]))
    assert restored.step == SUPERVISED + RL
    data = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, restored.state
    )
    leaves = {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in jax.tree.flatten_with_path(data)[0]}
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k not in training.TIMES} for line in lines]
    return leaves, rows


def events(directory):
    """What TensorBoard shows: ``{(tag, step): value}``; a restart hides what came at or after its first step."""
    shown = {}
    for path in sorted((directory / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            if at + 16 + length > len(data):
                break  # Cut by the kill.
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.HasField("session_log") and event.session_log.status == 1:
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown, (value.tag, event.step)
                if value.tag not in training.TIMES:
                    shown[value.tag, event.step] = value.simple_value
    return shown


def assert_as_whole(root, name):
    leaves, rows = state_and_rows(root, name)
    expected, expected_rows = state_and_rows(root, "whole")
    assert leaves.keys() == expected.keys()
    assert [path for path in leaves if leaves[path] != expected[path]] == []
    assert rows == expected_rows and [row["step"] for row in rows] == list(range(1, SUPERVISED + RL + 1))
    assert events(root / name) == events(root / "whole")
    assert (root / name / "transcripts.txt").read_text() == (root / "whole" / "transcripts.txt").read_text()


def test_killed_at_random_moments_ends_in_the_same_bits(place):
    """Before the first checkpoint, in the cold start, between the phases, in RL, and while it is still starting."""
    root, _ = place
    draw, killed = random.Random(0), 0
    for rows in (2, 13, SUPERVISED, SUPERVISED + 3, SUPERVISED + RL - 3):
        process = launch(place, "killed")
        wait_for_rows(process, root / "killed", rows)
        time.sleep(draw.uniform(0.0, 0.08))
        killed += process.poll() is None
        process.kill()
        process.communicate()
    process = launch(place, "killed")
    time.sleep(draw.uniform(0.5, 3.0))
    process.kill()
    process.communicate()
    process = launch(place, "killed")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert killed >= 4 and "goes on after step" in out
    assert_as_whole(root, "killed")


def test_a_signal_stops_with_a_checkpoint(place):
    root, _ = place
    process = launch(place, "stopped")
    wait_for_rows(process, root / "stopped", 7)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "go on with --resume --name=stopped" in out and "Traceback" not in err
    rows = (root / "stopped" / "metrics.jsonl").read_text().count("\n")
    assert checkpoint.latest(root / "stopped" / "checkpoints") == rows
    process = launch(place, "stopped")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert_as_whole(root, "stopped")


def test_damaged_and_foreign_checkpoints_are_passed_over(place):
    root, _ = place
    shutil.copytree(root / "whole", root / "damaged")
    checkpoints = root / "damaged" / "checkpoints"
    newest = checkpoints / f"step_{SUPERVISED + RL}"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    (checkpoints / "step_999").mkdir()
    (checkpoints / "step_999" / "weights.bin").write_bytes(b"not ours")
    process = launch(place, "damaged")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "truncated or altered" in out and "step_999 is incomplete or foreign" in out
    assert "goes on after step 35 of 36" in out
    shutil.rmtree(checkpoints / "step_999")
    assert_as_whole(root, "damaged")


def test_without_a_usable_checkpoint_there_is_a_clear_error(place):
    root, _ = place
    shutil.copytree(root / "whole", root / "ruined")
    for manifest in (root / "ruined" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    process = launch(place, "ruined")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 2 and err.startswith("error: no checkpoint in") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", 2), ("learning_rate", 0.7), ("steps", 99), ("seed", 7), ("hyper", ("weight_decay=1",))],
)
def test_other_settings_are_refused_by_name(place, name, value):
    with pytest.raises(ValueError, match=rf"--{name}=.*was started with"):
        training.open_run({"root": str(place[0]), "name": "whole", "resume": True, name: value})


def test_settings_that_move_no_number_may_change(place):
    given = {"root": str(place[0]), "name": "whole", "resume": True, "layers": 1, "save_every": 7, "progress": "live"}
    setup, _, again = training.open_run(given)
    assert again and setup.settings.save_every == 7 and setup.settings.layers == 1


def test_a_changed_environment_is_refused(place):
    shutil.copytree(place[0] / "whole", place[0] / "older")
    config = place[0] / "older" / "config.json"
    config.write_text(config.read_text().replace('"version": "1"', '"version": "0"'))
    with pytest.raises(ValueError, match=r"does not fit any more: env.version was '0', is '1'"):
        training.open_run({"root": str(place[0]), "name": "older", "resume": True})


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no config\.json: it is not a run"):
        training.open_run({"root": str(tmp_path), "name": "notes", "resume": True})
