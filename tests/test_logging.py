"""Run directories, configurations, metrics without duplicate steps, and a display that nothing breaks."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.files import dumps, loads, write_atomic
from agentrl_jax.logging import (
    MetricsWriter,
    Progress,
    read_config,
    read_metrics,
    run_directory,
    write_config,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text().filter(lambda key: key not in ("__tuple__", "__float__")), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_run_directory(tmp_path):
    directory = run_directory(tmp_path / "runs", "first")
    assert directory == tmp_path / "runs" / "first"
    assert run_directory(tmp_path / "runs", "first") == directory  # Empty: nothing to lose.
    (directory / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"the run .first. exists in .*resume it, or choose another name"):
        run_directory(tmp_path / "runs", "first")
    assert run_directory(tmp_path / "runs", "first", resume=True) == directory
    assert (directory / "config.json").read_text() == "{}"
    assert run_directory(tmp_path / "runs", "sweep/lr", resume=True).is_dir()
    for name in ("", "..", "../x", "/x", "a\0b", "a/../../b"):
        with pytest.raises(ValueError, match="name"):
            run_directory(tmp_path / "runs", name)
    (tmp_path / "runs" / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        run_directory(tmp_path / "runs", "file", resume=True)


@settings(deadline=None, max_examples=60)
@given(value=st.dictionaries(st.text().filter(lambda key: key not in ("__tuple__", "__float__")), values, max_size=4))
def test_json_reads_back_equal(value):
    text = dumps(value)
    assert loads(text) == value
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_config_round_trip(tmp_path):
    config = {"lr": 3e-4, "clip": float("inf"), "widths": (32, 64), "name": "é\u2028", "nested": {"a": [1, None, True]}}
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    write_config(tmp_path, {"nan": float("nan")})
    assert math.isnan(read_config(tmp_path)["nan"])
    with pytest.raises(TypeError, match=r"value\['policy'\] is a function"):
        write_config(tmp_path, {"policy": lambda: None})
    with pytest.raises(TypeError, match="keys must be strings"):
        write_config(tmp_path, {"a": {1: 2}})
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list, expected an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomic(path, "old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_are_valid_json_and_read_back(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"reward": np.float32(0.5), "kl": float("nan"), "phase": "rl", "done": True})
        writer.write(3, {"reward": jnp.asarray(-np.inf), "count": np.int64(7), "one": np.ones((1, 1))})
        with pytest.raises(ValueError, match="step 3 comes after step 3"):
            writer.write(3, {})
        with pytest.raises(ValueError, match="metric 'x' is"):
            writer.write(4, {"x": np.ones(2)})
        with pytest.raises(ValueError, match="cannot be names"):
            writer.write(4, {"time": 1})
        rows = read_metrics(tmp_path)  # Flushed: visible before closing.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert strict[0]["kl"] is None
    assert strict[1]["reward"] is None
    assert math.isnan(rows[0]["kl"])
    assert {name: rows[0][name] for name in ("step", "reward", "phase", "done")} == {
        "step": 0,
        "reward": 0.5,
        "phase": "rl",
        "done": True,
    }
    assert (rows[1]["count"], rows[1]["one"]) == (7, 1.0)


def test_resume_never_repeats_a_step(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(10):
            writer.write(step, {"reward": step, "bad": float("nan")})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "rew')  # Killed here.
    assert len(read_metrics(tmp_path)) == 10
    with MetricsWriter(tmp_path, resume_step=7, tensorboard=False) as writer:
        writer.write(7, {"reward": 70})
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:7] == before[:7]
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(8))
    assert read_metrics(tmp_path)[-1]["reward"] == 70
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(ValueError, match="must increase"):
        writer.write(5, {})
    with MetricsWriter(tmp_path, resume_step=0, tensorboard=False) as writer:
        writer.write(0, {})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]


def test_malformed_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[1]\n')
    with pytest.raises(ValueError, match="line 2: expected an object with an integer step"):
        read_metrics(tmp_path)


def test_tensorboard_events(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.25, "kl": float("nan"), "phase": "rl"})
    data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"reward" in data
    assert np.float32(0.25).tobytes() in data
    assert b"kl" not in data


def test_plain_progress_is_one_line_every_so_often():
    file = io.StringIO()
    with Progress(20, every=5, file=file) as progress:
        for step in range(1, 21):
            progress.update(step, {"reward": 0.5, "success": 0.25, "kl": float("nan")}, phase="rl")
    lines = file.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"rl {step}/20" for step in (1, 5, 10, 15, 20)]
    assert "reward 0.500 | success 25.0% | KL -" in lines[0]
    assert lines[-1].endswith("left 0:00:00")


@pytest.mark.parametrize("live", [False, True])
def test_progress_survives_anything(live):
    file = io.StringIO()
    odd = [{}, {"reward": None}, {"success": "x"}, {"kl": float("-inf")}, {"entropy": jnp.nan}, {"reward": np.ones(3)}]
    with Progress(0, every=1, file=file, live=live) as progress:
        for step, metrics in enumerate(odd):
            progress.update(step, metrics, phase="[red]rl[/oops]")
            assert "0" in progress.line()
    assert "[red]rl[/oops]" in file.getvalue()


def test_live_progress_shows_the_numbers():
    file = io.StringIO()
    with Progress(10, file=file, live=True) as progress:
        progress.update(1, {"reward": 0.125, "tokens_per_second": 12345.6}, phase="supervised")
        progress.update(2, {"reward": 0.25, "tokens_per_second": 12345.6}, phase="supervised")
    text = file.getvalue()
    assert "0.250" in text
    assert "12,346" in text
    assert "supervised" in text
    assert "2/10" in text
