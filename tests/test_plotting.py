"""Plots: a PNG each, the numbers that were given, gaps for what is missing, no global state."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from agentrl_jax import plotting
from agentrl_jax.intervals import bootstrap_band
from agentrl_jax.plotting import Panel, curves_with_interval, learning_curve


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, in order."""
    seen = []
    save = plotting._save

    def watched(figure, path, title):
        seen.append(figure)
        return save(figure, path, title)

    monkeypatch.setattr(plotting, "_save", watched)
    return seen


def rows(steps=12, cut=5):
    return [
        {
            "step": s,
            "phase": "supervised" if s < cut else "rl",
            "success": s / steps,
            "reward": s / 2,
            "entropy": 1.0 / (s + 1),
        }
        for s in range(steps)
    ]


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.get_lines() if not line.get_label().startswith("_")}


def test_learning_curve(tmp_path, figures):
    data = rows()
    data[3]["success"] = float("nan")
    data[4]["success"] = None
    data[6]["success"] = float("inf")
    path = learning_curve(tmp_path / "curve.png", data, title="run")
    image = imread(path)
    assert image.shape[0] > 300
    assert image.shape[1] > 600
    assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 20
    task, exploration = figures[0].axes  # Panels without data are left out.
    assert (task.get_title(loc="left"), exploration.get_title(loc="left")) == ("Task", "Exploration")
    kept = [s for s in range(12) if s not in (3, 4, 6)]
    np.testing.assert_allclose(lines(task)["success"], [[s, s / 12] for s in kept])
    np.testing.assert_allclose(lines(task)["reward"], [[s, s / 2] for s in range(12)])
    assert [patch.get_width() for patch in task.patches] == [4.5, 6.5]
    assert [text.get_text() for text in task.texts] == ["supervised", "RL"]
    assert (task.get_xlabel(), task.get_ylabel()) == ("training step", "share of episodes, reward")
    assert [text.get_text() for text in task.get_legend().get_texts()] == ["success", "reward"]


def test_one_phase_has_no_shade_and_panels_can_be_chosen(tmp_path, figures):
    panel = Panel("Mine", "apples", (("apples", "apples"),), (0.0, 9.0))
    learning_curve(
        tmp_path / "mine.png", [{"step": 0, "apples": 1, "phase": "rl"}, {"step": 1, "apples": 3}], panels=[panel]
    )
    learning_curve(tmp_path / "one.png", [{"step": 0, "apples": 1}], panels=[panel])
    (axis,) = figures[1].axes
    assert not axis.patches
    assert axis.get_ylim() == (0.0, 9.0)


def test_smoothing_is_a_centred_mean(tmp_path, figures):
    data = [{"step": s, "success": float(s % 2)} for s in range(9)]
    learning_curve(tmp_path / "smooth.png", data, smooth=3)
    smooth = lines(figures[0].axes[0])["success"][:, 1]
    np.testing.assert_allclose(smooth[1:-1], [(s % 2 + 2 * ((s + 1) % 2)) / 3 for s in range(1, 8)])
    np.testing.assert_allclose(smooth[[0, -1]], [0.5, 0.5])


def test_learning_curve_refuses(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot in 0 rows"):
        learning_curve(tmp_path / "x.png", [])
    with pytest.raises(ValueError, match=r"looked for .*success.* found \['loss', 'step'\]"):
        learning_curve(tmp_path / "x.png", [{"step": 0, "loss": 1.0}])
    with pytest.raises(ValueError, match="smooth is 0"):
        learning_curve(tmp_path / "x.png", rows(), smooth=0)


def test_curves_with_interval(tmp_path, figures):
    x = np.random.default_rng(0).random((5, 7))
    path = curves_with_interval(tmp_path / "seeds.png", {"a": x, "b": x[:1]}, limits=(0.0, 1.0), resamples=200)
    assert imread(path).shape[1] > 600
    (axis,) = figures[0].axes
    drawn = lines(axis)
    np.testing.assert_allclose(drawn["a (n = 5)"], np.stack([np.arange(1, 8), x.mean(0)], axis=1))
    np.testing.assert_allclose(drawn["b (n = 1)"][:, 1], x[0])
    _, low, high = bootstrap_band(x, resamples=200)
    band = axis.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(low.min())
    assert band[:, 1].max() == pytest.approx(high.max())
    curves_with_interval(tmp_path / "iqm.png", {"a": x}, statistic="iqm", steps=np.arange(7) * 10, resamples=200)
    (axis,) = figures[1].axes
    np.testing.assert_allclose(lines(axis)["a (n = 5)"], np.stack([np.arange(7) * 10, np.sort(x, 0)[1:4].mean(0)], 1))


def test_curves_refuse(tmp_path):
    path = tmp_path / "x.png"
    with pytest.raises(ValueError, match="no curves"):
        curves_with_interval(path, {})
    with pytest.raises(ValueError, match="allowed are mean, iqm"):
        curves_with_interval(path, {"a": np.ones((2, 3))}, statistic="median")
    with pytest.raises(ValueError, match="must be finite"):
        curves_with_interval(path, {"a": np.full((2, 3), np.nan)})
    with pytest.raises(ValueError, match=r"'a' has 3 steps, but steps has shape \(2,\)"):
        curves_with_interval(path, {"a": np.ones((2, 3))}, steps=[1, 2])
    assert not path.exists()


def test_neither_import_nor_plot_touches_pyplot(tmp_path):
    code = (
        "import sys; from agentrl_jax import plotting; assert 'matplotlib' not in sys.modules;"
        "plotting.learning_curve(sys.argv[1], [{'step': 0, 'success': 1.0}]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], check=True)
