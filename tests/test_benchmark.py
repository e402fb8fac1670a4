"""The benchmark: statistics by hand, a budget of tokens, pairs that are done once, failures that stay alone, sweeps."""

import json
import math
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from matplotlib.image import imread
from scipy.stats import mannwhitneyu
from tiny import POLICY

from agentrl_jax import algorithms, train
from agentrl_jax.metrics import scalar

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import bench_grid  # noqa: E402
import bench_plots  # noqa: E402
import bench_report  # noqa: E402
import bench_train  # noqa: E402
import benchmark  # noqa: E402
from bench_report import Outcome  # noqa: E402

TINY = (
    "--layers=1", "--width=16", "--heads=2", "--supervised_steps=2", "--supervised_episodes=8", "--episodes=8",
    "--group_size=4", "--seeds=2", "--budget=200", "--evals=2", "--eval_problems=4", "--eval_samples=2", "--bar=0.5",
)  # fmt: skip


def parsed(*arguments):
    values = flags.FlagValues()
    benchmark.define_flags(values)
    values(["benchmark.py", *arguments])
    return benchmark.training.given(values, bench_grid.Options)


def options(*arguments):
    return bench_grid.Options(**parsed(*TINY, *arguments))


# Statistics


def outcome(success, label="a", arena="e", used=None, **evals):
    success = np.asarray(success, np.float64)
    used = np.broadcast_to(np.arange(success.shape[1]) * 100.0, success.shape) if used is None else np.asarray(used)
    zero = np.zeros(success.shape)
    names = ("greedy", "reward", "length", "written", "turns", "entropy", "kl_start", "step", *bench_train.SOMETIMES)
    base = {name: zero for name in names}
    steps = tuple({"zero_variance": [0.5, None, 1.0]} for _ in success)
    seconds = {"compile": 9.0, "wait": 1.0, "train": 2.0, "evaluate": 3.0}
    return Outcome(arena, label, base | evals | {"used": used}, {1: success, 2: success}, steps, 200, seconds)


def test_tokens_to_the_bar_lie_on_straight_lines():
    used, success = [0, 100, 200, 300], [0.2, 0.4, 0.8, 0.7]
    assert bench_report.tokens_to_bar(used, success, 0.6) == 150
    assert bench_report.tokens_to_bar(used, success, 0.4) == 100
    assert bench_report.tokens_to_bar(used, success, 0.1) == 0
    assert bench_report.tokens_to_bar(used, success, 0.9) == math.inf


@pytest.mark.parametrize(
    ("ends", "median", "reached"),
    [((0.5, 1.0, 1.0), 100.0, 3), ((0.4, 0.5, 1.0), 200.0, 2), ((0.4, 0.4, 1.0), None, 1), ((0.4, 1.0), None, 1)],
)
def test_a_run_that_never_gets_there_counts_as_later_than_all(ends, median, reached):
    found = bench_report.at_bar(outcome([(0.0, end) for end in ends], used=[(0, 200)] * len(ends)), 0.5)
    assert found == {"median": median, "reached": reached, "seeds": len(ends)}


def test_a_row_of_the_table_by_hand():
    mine = outcome([[0.1, x] for x in (0.2, 0.4, 0.6, 1.0)], "mine", used=[[0, 200]] * 4)
    base = outcome([[0.1, x] for x in (0.4, 0.5)], "base")
    row = bench_report.summary(mine, base, 0.5)
    assert row["iqm"].estimate == pytest.approx(0.5) and row["mean"].estimate == pytest.approx(0.55)
    assert row["iqm"].low < 0.5 < row["iqm"].high <= 1.0
    # .2 loses twice, .4 ties once and loses once, the others win twice.
    assert row["better"].estimate == pytest.approx(4.5 / 8)
    expected = mannwhitneyu(mine.final, base.final).statistic / 8
    assert row["better"].estimate == pytest.approx(expected)
    assert row["zero_variance"] == 0.75 and row["complete"] and row["seconds"]["all"] == 6
    assert (
        bench_report.summary(base, base, 0.5)["better"] is None
        and not bench_report.summary(base, None, 0.5)["complete"]
    )


def test_pooled_intervals_draw_seeds_within_an_environment():
    """One environment always ends at 0, the other at 1: however seeds are drawn, the middle of all is a half."""
    rows = [outcome([[0.0, x]] * 4, "mine", arena) for arena, x in (("e", 0.0), ("f", 1.0))]
    base = [outcome([[0.0, x]] * 3, "base", arena) for arena, x in (("e", 0.0), ("f", 0.0))]
    found = bench_report.pooled(rows, base)
    assert tuple(found["iqm"]) == (0.5, 0.5, 0.5)
    assert tuple(found["better"]) == (0.75, 0.75, 0.75)
    assert bench_report.pooled(base, base)["better"] is None
    spread = bench_report.pooled([outcome([[0, x] for x in (0.0, 0.2, 0.8, 1.0)], "mine")], [None])["iqm"]
    assert spread.estimate == pytest.approx(0.5) and 0 <= spread.low < 0.5 < spread.high <= 1
    single = bench_report.stratified(bench_report._pooled_iqm, [np.array([0.3])])
    assert tuple(single) == pytest.approx((0.3, 0.3, 0.3))


def test_the_table_says_what_is_missing():
    rows = [outcome([[0.1, 0.9], [0.1, 0.8]], "grpo"), outcome([[0.1, 0.5]], "ppo|x")]
    others = [{"status": "failed", "method": "rloo", "arena": "e", "reason": "RuntimeError: no", "traceback": "..."}]
    numbers = bench_report.report(rows, others, baseline="grpo", bar=0.5, about={"command": "literal"})
    text = bench_report.markdown(numbers)
    assert "    literal" in text and "- rloo on e: failed: RuntimeError: no" in text
    assert r"| ppo\|x *" in text and "| grpo * | 85.0 [80.0, 90.0] | 85.0 |" in text
    assert "Start: pass@1 10.0, pass@2 10.0, greedy 0.0." in text and "| 0.00 [0.00, 0.00] |" in text
    assert "All environments" not in text


# What is asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algos=grpo,sarsa"], "unknown algorithm 'sarsa'; known: .*grpo"),
        (["--envs=maze"], "unknown environment 'maze'; known: calculator"),
        (["--algos=grpo:epsilons=1"], "grpo has no .*epsilons.*eps_high"),
        (["--algos=grpo:eps_high"], "expected name=value"),
        (["--algos=grpo:group_size=0"], "group_size must be a whole number of at least 1, got 0"),
        (["--algos=grpo:learning_rate=-1"], "learning_rate must not be negative"),
        (["--algos=grpo,grpo"], "'grpo' stands there twice: give one of them another label"),
        (["--algos= , "], "--algos is empty"),
        (["--envs=guess:higher=3"], "guess has no parameter 'higher'; it has: low, high"),
        (["--envs=guess:max_tokens=x"], "max_tokens must be a whole number"),
        (["--envs=guess:held_out=1"], "held_out must be in"),
        (["--episodes=10"], "episodes=10 must be a multiple of group_size=4"),
        (["--widths=wide"], "a width must be a whole number"),
        (["--heads=3"], "width=16 is not a multiple of heads=3"),
        (["--seeds=0"], "lower bound|positive|>= 1"),
        (["--how=all"], "map"),
        (["--bar=2"], "bar"),
        (["--algos=grpo", "--sweep=lr"], "expected name=value,value"),
        (["--algos=grpo", "--sweep=lr=1,x"], "could not convert"),
        (["--algos=grpo", "--sweep=lr=1,1"], "a value stands there twice"),
        (["--algos=grpo", "--sweep=lr=1;learning_rate=2"], "every name once"),
        (["--algos=grpo", "--sweep=kl_coef=.1"], "no traced number 'kl_coef'; .*eps_high.*turn it on"),
        (["--algos=grpo", "--sweep=lr=-1"], "learning_rate must not be negative"),
        (["--algos=grpo,rloo", "--sweep=lr=1"], "one algorithm, and --algos names 2"),
        (["--algos=rloo:epochs=2", "--envs=guess"], "nothing can be played: rloo:epochs=2 on guess: .*epochs"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_line(arguments, message):
    with pytest.raises((ValueError, flags.Error), match=message) as error:
        bench_grid.plan(options(*arguments))
    assert "\n" not in str(error.value)


def test_a_plan_says_what_every_pair_gets():
    chosen = options(
        "--algos=grpo,rloo,online_dpo:group_size=8:label=dpo,grpo:eps_high=.3:learning_rate=1e-2:label=high",
        "--envs=guess:max_turns=3:label=short,probe_delayed", "--epochs=2", "--widths=16", "--slots=4",
    )  # fmt: skip
    plan = bench_grid.plan(chosen)
    assert [pair.label for pair in plan[:4]] == ["grpo on short", "rloo on short", "dpo on short", "high on short"]
    grpo, rloo, dpo, high = plan[:4]
    assert grpo.config.update.epochs == 2 and rloo.config.update.epochs == 1 and dpo.config.group_size == 8
    assert grpo.config[:5] == (8, 4, 4, 96, 1) and grpo.config.update.widths == (16,)
    assert grpo.arena.env.spec.max_turns == 3 and grpo.arena.env.params.high == 20 and grpo.arena is high.arena
    numbers = bench_grid.hyper(high.method, high.arena, high.points[0], chosen)
    assert float(numbers.learning_rate) == np.float32(1e-2) and float(numbers.algorithm["eps_high"]) == np.float32(0.3)
    assert len({pair.key for pair in plan}) == len(plan) == len({pair.file for pair in plan})


def test_a_key_follows_from_all_that_matters_and_nothing_else():
    key = lambda *arguments: bench_grid.plan(options("--algos=grpo", "--envs=guess", *arguments))[0].key  # noqa: E731
    first = key()
    assert first == key("--how=vmap", "--name=other", "--bar=0.1", "--baseline=x")
    for argument in (
        "--seed=1",
        "--seeds=3",
        "--budget=9",
        "--supervised_steps=3",
        "--width=32",
        "--algos=grpo:ddof=0",
    ):
        assert first != key(argument)


def test_a_key_follows_from_the_questions_of_a_file(tmp_path):
    path, keys = tmp_path / "q.jsonl", set()
    for answer in "12":
        path.write_text(f'{{"prompt": "1+1", "answer": "{answer}"}}\n{{"prompt": "a", "answer": "b"}}\n')
        keys.add(bench_grid.plan(options("--algos=rloo", f"--envs=tasks:path={path}:held_out=0"))[0].key)
    assert len(keys) == 2


def test_what_an_environment_lacks_is_no_failure(monkeypatch):
    made = algorithms.make
    needy = made("grpo")._replace(name="needy", needs=frozenset({"parts:marks"}))
    monkeypatch.setattr(algorithms, "make", lambda name, **given: needy if name == "needy" else made(name, **given))
    pairs = bench_grid.plan(options("--algos=grpo,needy", "--envs=guess"))
    assert not pairs[0].reason and "needs the parts ['marks']" in pairs[1].reason


def test_tasks_in_series_and_thoughts_are_options_of_any_environment():
    text = "probe_observation:series=3:paid_at_end=True:thoughts=2:held_out=0"
    arena = bench_grid.plan(options("--algos=grpo", f"--envs={text}"))[0].arena
    assert arena.env.name == "thinking(series(probe_observation,3,paid_at_end),2)" and arena.env.spec.max_turns == 3
    with pytest.raises(ValueError, match="paid_at_end belongs to series=N"):
        bench_grid.plan(options("--algos=grpo", "--envs=guess:paid_at_end=True"))
    with pytest.raises(ValueError, match="tasks must be an int of at least 2, got 1"):
        bench_grid.plan(options("--algos=grpo", "--envs=guess:series=1"))


# Statistics of a pair


def test_agreement_is_the_mean_cosine_of_the_seeds_gradients():
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(6, 5)) + 0.5
    mu = {"w": jnp.asarray(grads[:, :3]), "b": jnp.asarray(grads[:, 3:])}
    state = (optax.ScaleByAdamState(count=jnp.ones(6, jnp.int32), mu=mu, nu=mu),)
    unit = grads / np.linalg.norm(grads, axis=1, keepdims=True)
    expected = [
        np.mean([a @ b for i, a in enumerate(u) for j, b in enumerate(u) if i != j]) for u in (unit[:3], unit[3:])
    ]
    np.testing.assert_allclose(bench_train.agreement(state, 3), expected, rtol=1e-5)
    scaled = jax.tree.map(lambda x: x * jnp.arange(1.0, 7.0)[:, None], mu)
    np.testing.assert_allclose(bench_train.agreement((state[0]._replace(mu=scaled),), 3), expected, rtol=1e-5)


def test_agreement_leaves_gradients_of_nothing_out():
    mu = {"w": jnp.asarray([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]])}
    state = (optax.ScaleByAdamState(count=jnp.ones(6, jnp.int32), mu=mu, nu=mu),)
    first, second = bench_train.agreement(state, 3)
    assert first == pytest.approx(2**-0.5) and second is None
    assert bench_train.agreement(state, 1) == [None] * 6


def test_an_evaluation_without_failures_has_no_length_of_them():
    found = {"solved": np.array([2, 2]), "greedy": 1.0, "written_solved": 3.0, "written_failed": np.float32(np.nan)}
    numbers = bench_train.spelled(found, 2)
    assert numbers["written_failed"] is None and numbers["written_solved"] == 3.0 and numbers["pass"]["2"] == 1.0
    with pytest.raises(FloatingPointError, match="greedy of an evaluation is nan"):
        bench_train.spelled(found | {"greedy": np.nan}, 2)


# A budget


@pytest.mark.parametrize("how", ["map", "vmap", "pmap"])
def test_every_run_stops_at_its_own_budget(how):
    """Steps of 10 and 25 tokens (15 of which were thrown away): five and two of them make 50."""

    def step(state):
        spent = {"tokens": scalar(jnp.float32(10.0)), "extra_tokens": (state.params * 15.0, jnp.float32(4.0))}
        return state._replace(step=state.step + 1), spent

    state = train.TrainState(*[jnp.zeros(2)] * 8)
    state = state._replace(
        step=jnp.zeros(2, jnp.int32), params=jnp.array([0.0, 1.0]), key=jax.random.split(jax.random.key(0))
    )
    one = (jax.tree.map(lambda x: x[0], state), jnp.int32(0), jnp.int32(0))
    advance = bench_train.Lanes(bench_train.make_advance(step, 1000), how, 2).compile(one)
    state, used, rows = bench_train.run_to(advance, state, jnp.zeros(2, jnp.int32), 50, 1000)
    assert state.step.tolist() == [5, 2] and used.tolist() == [50, 50]
    assert rows[0]["used"] == [10, 20, 30, 40, 50] and rows[1]["used"] == [25, 50]
    state, used, rows = bench_train.run_to(advance, state, used, 250, 1000)
    assert state.step.tolist() == [25, 10] and len(rows[0]["used"]) == 20  # More than a call makes.
    limited = bench_train.Lanes(bench_train.make_advance(step, 27), how, 2).compile(one)
    state, used, rows = bench_train.run_to(limited, state, used, 10**6, 27)
    assert state.step.tolist() == [27, 27] and used.tolist() == [270, 675]


# Whole grids


def start(root, *arguments):
    return benchmark.benchmark({"root": str(root), **parsed(*TINY, *arguments)}, "the command")


GRID = (
    "--name=grid", "--algos=ppo,rloo",
    "--envs=probe_observation:label=echo:held_out=0,probe_delayed:label=dead:supervised_steps=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """``(root, directory)`` of a grid in which one algorithm and one environment fail."""
    root = tmp_path_factory.mktemp("runs")
    build_pair, build_judge = bench_train.build_pair, bench_train.build_judge

    def pair_or_not(pair, options):
        if pair.method.label == "rloo" or pair.arena.label == "dead":
            raise RuntimeError("out of luck\nsecond line")
        return build_pair(pair, options)

    def judge_or_not(arena, *rest):
        if arena.label == "dead":
            raise ValueError("nobody there")
        return build_judge(arena, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_grid, "transformer_policy", lambda model: POLICY)  # It compiles fast.
        patch.setattr(bench_train, "build_pair", pair_or_not)
        patch.setattr(bench_train, "build_judge", judge_or_not)
        assert start(root, *GRID) == 1
    return root, root / "grid"


def stored(directory):
    return {path.name.rsplit("-", 1)[0]: json.loads(path.read_text()) for path in (directory / "pairs").iterdir()}


def test_a_failure_stops_no_other_pair(grid):
    found = stored(grid[1])
    dead = {"dead--ppo": "failed", "dead--rloo": "failed"}
    alive = {"echo--ppo": "done", "echo--rloo": "failed"}
    assert {name: result["status"] for name, result in found.items()} == alive | dead
    failed = found["echo--rloo"]
    assert failed["reason"] == "RuntimeError: out of luck" and "second line" in failed["traceback"]
    assert all(found[name]["reason"] == "ValueError: nobody there" for name in dead)
    table = json.loads((grid[1] / "table.json").read_text())
    assert [x["method"] for x in table["environments"]["echo"]["methods"]] == ["ppo"]
    assert table["environments"].keys() == {"echo"} and len(table["others"]) == 3
    assert "- rloo on echo: failed: RuntimeError: out of luck" in (grid[1] / "table.md").read_text()


def test_a_pair_holds_its_curves(grid):
    result = stored(grid[1])["echo--ppo"]
    (group,) = result["groups"]
    assert group["label"] == "ppo" and len(group["seeds"]) == 2
    for seed in group["seeds"]:
        used = seed["steps"]["used"]
        assert all(len(values) == len(used) for values in seed["steps"].values())
        assert used[-2] < 200 <= used[-1] and np.allclose(np.cumsum(seed["steps"]["tokens"]), used)
        first, *_, last = seed["evals"]
        assert len(seed["evals"]) == 3 and first["used"] == first["step"] == 0 and last["step"] == len(used)
        assert last["used"] == used[-1] and set(last["pass"]) == {"1", "2"} and last["pass"]["1"] <= last["pass"]["2"]
        assert first["kl_start"] == 0 and last["kl_start"] != 0 and last["entropy"] > 0
    starts = [seed["evals"][0] for seed in group["seeds"]]
    assert all(start == starts[0] for start in starts)


def test_a_second_run_does_only_what_failed(grid, monkeypatch, capsys):
    root, directory = grid
    known, done = stored(directory)["echo--ppo"], []

    def again(pair, *rest):
        done.append(pair.label)
        return known | {"groups": [known["groups"][0] | {"label": pair.method.label}], "arena": pair.arena.label}

    monkeypatch.setattr(bench_grid, "transformer_policy", lambda model: POLICY)
    none = lambda jobs, pool, pairs, *rest: jobs.update({pair.key: None for pair in pairs})  # noqa: E731
    monkeypatch.setattr(bench_train, "ahead", none)
    monkeypatch.setattr(bench_train, "prepare", lambda *rest: None)
    monkeypatch.setattr(bench_train, "run_pair", again)
    before = {p: p.stat().st_mtime_ns for p in (directory / "pairs").iterdir()}
    assert start(root, *GRID) == 0
    assert done == ["rloo on echo", "ppo on dead", "rloo on dead"]
    changed = {p.name.rsplit("-", 1)[0] for p in (directory / "pairs").iterdir() if p.stat().st_mtime_ns != before[p]}
    assert changed == {"echo--rloo", "dead--ppo", "dead--rloo"}
    assert start(root, *GRID) == 0 and len(done) == 3
    assert capsys.readouterr().out.count("finished before") == 1 + 4
    table = json.loads((directory / "table.json").read_text())
    assert [x["method"] for x in table["environments"]["dead"]["methods"]] == ["ppo", "rloo"]
    assert len(table["overall"]) == 2 and not table["others"] and table["command"] == "the command"
    for kind in ("learning", "pass_at_k", "final"):
        assert imread(directory / f"{kind}-echo.png").shape[2] == 4


def test_a_sweep_from_the_stored_cold_start_equals_a_run_of_its_own(grid, monkeypatch):
    """The second point has the numbers of the grid's pair."""
    root, directory = grid
    shutil.copytree(directory / "cold_start", root / "sweep" / "cold_start")
    monkeypatch.setattr(bench_grid, "transformer_policy", lambda model: POLICY)
    monkeypatch.setattr(bench_train, "build_cold_start", None)
    envs = GRID[-1].split(",")[0]
    assert start(root, "--name=sweep", "--algos=ppo", envs, "--sweep=lr=1e-5,3e-4;eps_high=.2") == 0
    (swept,) = stored(root / "sweep").values()
    labels = ["learning_rate=1e-05 eps_high=0.2", "learning_rate=0.0003 eps_high=0.2"]
    assert [group["label"] for group in swept["groups"]] == labels
    pair = stored(directory)["echo--ppo"]["groups"][0]["seeds"]
    for slow, mine, other in zip(*(group["seeds"] for group in swept["groups"]), pair, strict=True):
        assert mine["steps"].keys() == other["steps"].keys()
        for name, values in mine["steps"].items():
            np.testing.assert_allclose(values, other["steps"][name], rtol=1e-3, atol=1e-5, err_msg=name)
        assert mine["evals"][-1]["kl_start"] == pytest.approx(other["evals"][-1]["kl_start"], rel=1e-2)
        assert slow["evals"][0] == mine["evals"][0] == other["evals"][0]
        assert abs(slow["evals"][-1]["kl_start"]) < abs(mine["evals"][-1]["kl_start"])
    table = json.loads((root / "sweep" / "table.json").read_text())["environments"]["echo"]["methods"]
    assert [row["method"] for row in table] == labels


def test_wrong_flags_touch_no_file(tmp_path, capsys):
    assert start(tmp_path, "--algos=sarsa") == 2 and not list(tmp_path.iterdir())
    assert capsys.readouterr().err.startswith("error: unknown algorithm 'sarsa'")
    assert start(tmp_path, "--name=../x", "--envs=guess") == 2 and "not a safe name" in capsys.readouterr().err


def test_many_methods_get_a_panel_each(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(bench_plots, "_save", lambda figure, path: figures.append(figure) or path)
    rows = [outcome(np.linspace(0, i / 9, 3) * np.ones((3, 1)), f"m{i}", "e") for i in range(9)]
    bench_plots.draw(tmp_path, rows, "m2")
    learning, passes, final = figures
    for figure in (learning, passes):
        assert [axis.get_title(loc="left") for axis in figure.axes] == [f"m{i}" for i in range(9)]
    grey = [sum(line.get_color() == "#9a9a9a" for line in axis.get_lines()) for axis in learning.axes]
    assert grey == [1, 1, 0, 1, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(learning.axes[8].get_lines()[1].get_ydata(), [0, 4 / 9, 8 / 9])
    assert [bar.get_width() for bar in final.axes[0].patches] == pytest.approx([i / 9 for i in range(9)])
    figures.clear()
    bench_plots.draw(tmp_path, rows[:2], "m0")
    assert len(figures[0].axes) == 4 and [text.get_text() for text in figures[0].legends[0].texts] == ["m0", "m1"]
