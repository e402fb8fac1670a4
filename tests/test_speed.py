"""The speed program runs at tiny sizes and prints one JSON line a measurement; no number is judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZES = "layers=1 d_model=32 heads=2 kv_heads=2 d_ff=64 prompt_len=8 completion_len=8 prompts_per_step=2 group_size=2"


def test_one_line_a_measurement_and_one_program():
    flags = [f"--{flag}" for flag in (SIZES + " steps=2 work=single work=env").split()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "speed.py"), *flags], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["work"] for row in rows] == ["single", "env"]
    assert rows[0]["compiled_programs"] == 1 and rows[0]["logp_gap"] < 1e-4
    assert 0 < rows[0]["slot_use"] <= 1 and rows[0]["step_s"] > 0 and rows[0]["update_share_of_matmul"] > 0
    assert rows[0]["devices"] == 2 and rows[0]["spread_step_s"] > 0
    assert rows[0]["mean_length"] == 16 and rows[0]["env_steps"] > 0


def test_unknown_workloads_are_listed():
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "speed.py"), "--work=singel"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "single" in done.stderr
