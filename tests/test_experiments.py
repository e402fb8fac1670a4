"""The training and evaluation programs as a user starts them: files, output, wrong input."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import fast
import numpy as np
import pytest
from absl import flags
from matplotlib.image import imread

from agentrl_jax import checkpoint
from agentrl_jax.envs import registry
from agentrl_jax.evaluate import Evaluation
from agentrl_jax.logging import read_config, read_metrics

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import building  # noqa: E402
import evaluate as evaluating  # noqa: E402
import reporting  # noqa: E402
import settings as settings_lib  # noqa: E402
import train as training  # noqa: E402

WORDS = EXPERIMENTS / "data" / "arithmetic_words.jsonl"
TINY = (
    "--layers=1", "--width=16", "--heads=2", "--mlp_width=32", "--supervised_steps=12", "--supervised_episodes=8",
    "--steps=3", "--episodes=8", "--group_size=4", "--max_tokens=48", "--eval_every=2", "--eval_problems=6",
    "--eval_samples=2", "--save_every=5", "--progress=plain", "--env_option=max_operators=1",
    "--env_option=max_depth=0", "--env_option=max_turns=2", "--env_option=max_digits=2",
)  # fmt: skip


def start(program, *arguments):
    env = {**os.environ, "XLA_FLAGS": fast.XLA_FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXPERIMENTS / program), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """``(directory, standard output, cache)`` of one tiny run."""
    root = tmp_path_factory.mktemp("runs")
    cache = tmp_path_factory.mktemp("cache")
    done = start("train.py", f"--root={root}", "--name=tiny", f"--compile_cache={cache}", *TINY)
    assert done.returncode == 0, done.stderr
    return root / "tiny", done.stdout, cache


def parsed(*arguments):
    values = flags.FlagValues()
    training.define_flags(values)
    values(["train.py", *arguments])
    return training.given(values)


def test_all_files_are_there(run):
    directory, _, _ = run
    files = {"config.json", "metrics.jsonl", "transcripts.txt", "learning_curve.png", "cold_start.png", "summary.json"}
    assert files | {"checkpoints", "tensorboard"} == {path.name for path in directory.iterdir()}
    assert imread(directory / "learning_curve.png").shape[2] == 4
    assert list((directory / "tensorboard").iterdir())


def test_config_builds_the_same_run(run):
    stored = read_config(run[0])
    rebuilt = building.describe(building.build(settings_lib.Settings(**stored["settings"])))
    assert {name: stored[name] for name in rebuilt} == rebuilt
    assert stored["derived"]["env"]["name"] == "held_out(calculator,train,0.1)"
    assert stored["derived"]["env"]["params"]["teacher_wrong"] == 0.4
    assert stored["derived"]["phases"]["rl"]["numbers"]["algorithm"]["eps_low"] == pytest.approx(0.2)


def test_one_row_a_step_over_both_phases(run):
    rows = read_metrics(run[0])
    assert [row["step"] for row in rows] == list(range(1, 16))
    assert [row["phase"] for row in rows] == ["supervised"] * 12 + ["rl"] * 3
    assert all({"supervised_loss", "teacher_success", "teacher_tool_rate"} <= row.keys() for row in rows[:12])
    rl = {"loss", "reward", "success", "tool_rate", "entropy", "kl_old", "tokens_per_second", "max_logp_gap"}
    assert all(rl <= row.keys() for row in rows[12:])
    assert max(row["max_logp_gap"] for row in rows[12:]) < 1e-4
    assert [row["step"] for row in rows if "eval_success" in row] == [12, 14, 15]
    assert all("compile_seconds" in rows[i] for i in (0, 11, 12))


def test_the_cold_start_learns(run):
    rows = read_metrics(run[0])
    assert rows[11]["supervised_loss"] < rows[0]["supervised_loss"] - 0.5


def test_transcripts_tell_who_wrote_what(run):
    text = (run[0] / "transcripts.txt").read_text(encoding="utf-8")
    sections = text.split("\n=== step ")
    assert [section.split(" ", 2)[:2] for section in sections[1:]] == [
        ["12", "(supervised),"],
        ["14", "(rl),"],
        ["15", "(rl),"],
    ]
    for section in sections[1:]:
        assert section.count("  observation (") >= 3 and section.count("  action (") >= 3
        assert section.count(", advantage ") >= 3 and "=?" in section


def test_output_is_readable(run):
    directory, out, _ = run
    assert out.count("\nrow ") == 3
    for piece in (
        "supervised 1/12 | loss ",
        "rl 3/3 | reward ",
        "tool rate",
        "before RL",
        "after RL",
        "pass@2, sampled",
    ):
        assert piece in out, out
    assert f"files: {directory}/" in out and "waiting for the compiler" in out
    evaluations = json.loads((directory / "summary.json").read_text())["evaluations"]
    assert set(evaluations) == {"before RL", "after RL"}
    assert evaluations["after RL"]["problems"] == 6 and evaluations["after RL"]["split_miss"] == 0


def test_checkpoint_evaluates(run, tmp_path):
    directory, _, cache = run
    assert checkpoint.steps(directory / "checkpoints")[-1] == 15
    assert checkpoint.best(directory / "checkpoints", "eval_success") is not None
    done = start(
        "evaluate.py", f"--run={directory}", "--problems=6", "--samples=2", "--slots=8",
        f"--json={tmp_path / 'out.json'}",
        f"--compile_cache={cache}", "--transcripts=1", "--seed=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pass@2, sampled" in done.stdout and "  observation (" in done.stdout
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["step"] == 15 and numbers["problems"] == 6 and 0 <= numbers["success_low"] <= numbers["success_high"]
    assert numbers["env"] == "held_out(calculator,test,0.1)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=99"], "usable"),
        (["--step=last"], "latest or best"),
        (["--env=maze"], "known: .*calculator"),
        (["--env_params=max_digit=4"], "max_digits"),
        (["--tasks=nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--run=nowhere"], "no usable checkpoint in nowhere"),
        (["--env=probe_delayed"], "--held_out=0|--split=all"),
    ],
)
def test_wrong_evaluations_are_refused(run, arguments, message):
    values = flags.FlagValues()
    evaluating.define_flags(values)
    values(["evaluate.py", f"--run={run[0]}", *arguments])
    with pytest.raises(ValueError, match=message):
        evaluating.choose(values)


def test_an_evaluation_may_play_another_environment(run):
    values = flags.FlagValues()
    evaluating.define_flags(values)
    values(["evaluate.py", f"--run={run[0]}", f"--tasks={WORDS}", "--split=all", "--temperature=0.5"])
    chosen = evaluating.choose(values)
    assert chosen.setup.test.name == "tasks" and chosen.setup.settings.temperature == 0.5
    assert chosen.setup.max_tokens == building.build(settings_lib.Settings(tasks=str(WORDS))).max_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env=maze"], "unknown environment 'maze'; known: calculator"),
        (["--algorithm=sarsa"], "unknown algorithm 'sarsa'; known: .*grpo"),
        (["--hyper=eps=0.1"], r"unknown hyper-parameters \['eps'\]; grpo has: .*eps_high"),
        (["--hyper=eps_high=big"], "'big' is not a finite number"),
        (["--hyper=weight_decay=-1"], "weight_decay must not be negative"),
        (["--hyper=learning_rate=1"], "flag of its own"),
        (["--hyper=eps_high"], "expected name=value"),
        (["--lambda_=1"], "Unknown command line flag"),
        (["--discount=0.9"], r"unknown hyper-parameters \['discount'\]; grpo has"),
        (["--option=sale=none"], r"grpo has no option \['sale'\]"),
        (["--option=scale=zzz"], "Unknown scale 'zzz'"),
        (["--algorithm=lcpo", "--option=all_correct=maybe"], "all_correct must be of type bool, got 'maybe'"),
        (["--eps_low=0.1", "--algorithm=ppo", "--hyper=lambda_=2"], "lambda_ must be in"),
        (["--env_params=max_digit=3"], "has no parameter 'max_digit'; it has: .*max_digits"),
        (["--env_params=max_digits=2.5"], "must be a whole number"),
        (["--env_params=max_digits=9"], "exceeds the capacity max_digits=4"),
        (["--env_option=max_turn=9"], "max_turns"),
        (["--width=0"], "lower bound|positive|>= 1"),
        (["--learning_rate=-1"], "lower bound|non-negative|>= 0"),
        (["--heads=3"], "width=128 is not a multiple of heads=3"),
        (["--kv_heads=3"], "kv_heads=3 must divide heads=8"),
        (["--schedule=step"], "constant"),
        (["--dtype=int8"], "float32"),
        (["--episodes=100"], r"episodes \(100\) must be a multiple of group_size"),
        (["--group_size=1"], "group_size must be at least 2"),
        (["--slots=999"], "slots must be in"),
        (["--minibatches=3"], "do not split into 3 minibatches"),
        (["--temperature=0"], "temperature must be above 0"),
        (["--steps=0", "--supervised_steps=0"], "nothing to train"),
        (["--algorithm=ppo", "--value_head=no"], "ppo needs a critic"),
        (["--hyper=kl_coef=-1"], "kl_coef must not be negative"),
        (["--env=probe_delayed", "--supervised_steps=0"], "--held_out=0"),
        (["--env=tasks"], "--tasks=FILE"),
        (["--env=guess", f"--tasks={WORDS}"], "--env=guess"),
        (["--resume"], "--resume needs --name"),
        (["--name=../x"], "not a safe name"),
        (["--keep_last=0"], "keep_last"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message, tmp_path):
    with pytest.raises((ValueError, flags.Error), match=message) as error:
        training.open_run({"root": str(tmp_path), **parsed(*arguments)})
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "1+1?", "answer": 2}', '{"prompt": "1+2?"'], "line 2: not valid JSON"),
        (['{"prompt": "1+1?"}'], "line 1: missing key 'answer'"),
        ([], "no usable rows"),
    ],
)
def test_a_bad_tasks_file_names_its_line(lines, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"bad.jsonl: {message}"):
        building.build(settings_lib.Settings(tasks=str(path)))


@pytest.mark.parametrize("argument", ["--lyers=2", "more", "--tasks=nowhere.jsonl"])
def test_errors_end_the_program_without_a_traceback(argument, tmp_path):
    done = start("train.py", f"--root={tmp_path}", argument)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") <= 2 and "Traceback" not in done.stderr


def test_an_existing_run_is_not_overwritten(run):
    directory = run[0]
    with pytest.raises(FileExistsError, match="resume it, or choose another name"):
        training.open_run(parsed(f"--root={directory.parent}", "--name=tiny", *TINY))


def test_runs_without_a_name_are_numbered(tmp_path):
    for number in (1, 2):
        _, directory, again = training.open_run({"root": str(tmp_path), "held_out": 0.0})
        assert directory.name == f"calculator-grpo-{number}" and not again


def test_a_tasks_file_sets_lengths_and_reports_what_it_drops(tmp_path):
    rows = [f'{{"prompt": "{i} + {i}?", "answer": {2 * i}, "expression": "{i}+{i}"}}' for i in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join([*rows, rows[3], '{"prompt": "%s?", "answer": 1}' % ("x" * 300)]))
    setup = building.build(settings_lib.Settings(tasks=str(path)))
    # start, open, 8 bytes, open, "calc 39+39", end, open, "78", open, "answer 78", end: 36; and 24 to spare.
    assert setup.max_tokens == 64
    assert setup.notes == (f"{path}: 40 of 42 rows kept; 1 duplicate dropped (line 41); 1 over-long dropped (line 42)",)
    short = building.build(settings_lib.Settings(tasks=str(path), max_tokens=35))
    assert "30 rows need more than max_tokens=35" in short.notes[1] and "line 11, 12" in short.notes[1]


def test_the_shipped_word_problems_work_out_of_the_box():
    setup = building.build(settings_lib.Settings(tasks=str(WORDS)))
    assert setup.env.name == "held_out(tasks,train,0.1)" and len(setup.notes) == 1


def test_algorithms_get_what_they_need():
    ppo = building.build(settings_lib.Settings(algorithm="ppo", discount=0.9, hyper=("lambda_=0.8",)))
    assert ppo.policy.has_value and ppo.phases[1].algorithm.hyper["lambda_"] == 0.8
    assert ppo.phases[1].algorithm.hyper["discount"] == 0.9
    kept = building.build(settings_lib.Settings(kl_coef=0.01, option=("scale=none",)))
    free = building.build(settings_lib.Settings(kl_coef=0.0))
    assert "reference" not in free.phases[1].algorithm.needs
    assert "reference" in kept.phases[1].algorithm.needs and not kept.policy.has_value


def test_a_cold_start_needs_a_teacher(monkeypatch):
    alone = registry.make("probe_delayed")._replace(expert=None)
    monkeypatch.setitem(registry._registered, "alone", lambda: alone)
    with pytest.raises(ValueError, match="no scripted teacher: use --supervised_steps=0"):
        building.build(settings_lib.Settings(env="alone", held_out=0.0))
    without = building.build(settings_lib.Settings(env="alone", held_out=0.0, supervised_steps=0))
    assert [phase.name for phase in without.phases] == ["rl"]


def test_every_setting_has_help_and_a_fitting_default():
    for field in dataclasses.fields(settings_lib.Settings):
        assert field.metadata["help"].endswith("."), field.name
    settings_lib.check_ranges(settings_lib.Settings())
    assert set(settings_lib.FREE) | set(settings_lib.NUMBERS) <= {
        f.name for f in dataclasses.fields(settings_lib.Settings)
    }


def test_outcome_golden():
    success = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]], np.float32)
    calls = np.array([[2, 0, 0, 0, 0], [0, 1, 1, 1, 1]], np.float32)

    class Rows:
        truncated = np.zeros(10, bool)

    found = reporting.outcome(Evaluation(success, success, success + 1, success, success, {"tool_calls": calls}, Rows))
    assert found["success"] == 0.5 and found["success_low"] == pytest.approx(0.0945, abs=1e-4)
    # One of four: 1 - C(3, k) / C(4, k) = 1/4, 1/2, 3/4, 1; four of four: 1.
    assert [found[f"pass_{k}"] for k in (1, 2, 3, 4)] == pytest.approx([0.625, 0.75, 0.875, 1.0])
    assert found["tool_rate"] == 0.5 and found["sampled_tool_rate"] == 0.5 and found["tool_calls"] == 1.0
    assert found["turns"] == 1.5 and found["sampled_turns"] == 1.625
    assert "pass@4, sampled" in reporting.table({"a": found, "b": {}})


def test_outcome_of_a_mixture_names_its_members():
    solved = np.array([[1, 1], [0, 1], [1, 0]], np.float32)

    class Rows:
        truncated = np.zeros(6, bool)

    member = np.array([[0, 0], [0, 0], [1, 1]])
    found = reporting.outcome(Evaluation(*[solved] * 5, {}, Rows, member), ("one", "two", "three"))
    assert (found["success_one"], found["success_two"]) == (0.5, 1.0) and found["success_two_low"] < 0.3
    assert "success_three" not in found
    lines = reporting.table({"a": found}).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["one", "two"] and "50.0 % [" in lines[3]


def test_switches_are_words_or_literals():
    found = settings_lib.pairs("option", ("a=no", "b=True", "c=YES", "d=none", "e=None", "f=1e-3", "g=false"))
    assert found == {"a": False, "b": True, "c": True, "d": "none", "e": None, "f": 1e-3, "g": False}


def test_an_error_while_training_is_one_line(run, monkeypatch, capsys):
    class Broken:
        step, closed = 0, False

        def __init__(self, *_):
            pass

        def run(self):
            raise ValueError("no such thing")

        def close(self):
            Broken.closed = True

    directory = run[0]
    monkeypatch.setattr(training, "Trainer", Broken)
    assert training.train_run(parsed(f"--root={directory.parent}", "--name=tiny", "--resume")) == 2
    assert capsys.readouterr().err == "error: no such thing\n" and Broken.closed


def test_transcripts_are_cut_at_a_step(tmp_path):
    path = tmp_path / "transcripts.txt"
    for step in (5, 9, 12):
        reporting.add_transcripts(path, step, "(rl)", [f"episode {step}\n    | === step 1\n"])
        if step == 9:
            kept = path.read_text()
    reporting.trim_transcripts(path, 11)
    assert path.read_text() == kept and "episode 9" in kept
    reporting.trim_transcripts(tmp_path / "none.txt", 3)
