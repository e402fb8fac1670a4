"""Every notebook runs from top to bottom, and says what it promises."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "colab"


def _executed(name, directory):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    # A cell that compiles for a minute takes many on a machine that is busy otherwise.
    return NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(directory)}}).execute()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    return _executed("quickstart.ipynb", tmp_path_factory.mktemp("colab"))


def _printed(notebook, beginning):
    texts = [o["text"] for c in notebook.cells for o in c.get("outputs", []) if o.get("output_type") == "stream"]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(beginning)]
    assert lines, f"no output begins with {beginning!r}: {texts}"
    return lines[0]


def test_tool_use_earns_the_reward(quickstart):
    assert _printed(quickstart, "reward:").split()[1] == "1.0"


def test_open_loop_learns(quickstart):
    assert float(_printed(quickstart, "mean reward").rsplit(" ", 1)[1]) > 0.9


def test_eight_seeds_learn(quickstart):
    line = _printed(quickstart, "final success of eight seeds:")
    values = [float(x) for x in line.split("[")[1].strip("]").split(",")]
    assert len(values) == 8 and sum(values) / 8 > 0.9


def _number(notebook, beginning):
    """What follows the beginning of a printed line."""
    return float(_printed(notebook, f"{beginning} ").removeprefix(beginning).split()[0])


def test_three_variants_are_compared(tmp_path):
    """One test: the notebook runs once, however tests are shared out."""
    notebook = _executed("compare_algorithms.ipynb", tmp_path)
    number = lambda beginning: _number(notebook, beginning)  # noqa: E731
    start, grpo = number("pass@1: cold start"), number("pass@1: grpo")
    assert start < 0.7 and grpo > 0.85
    for name in ("grpo", "pass@4", "anchored"):
        assert number(f"pass@1: {name}") > start + 0.1
    assert number("pass@1: pass@4") < grpo
    assert number("entropy: pass@4") > 2 * number("entropy: grpo")
    assert number("omega 0: pass@1") == pytest.approx(grpo, abs=0.03)
    assert (tmp_path / "compare_algorithms.png").stat().st_size > 0


def test_notebooks_are_committed_without_output():
    for path in FOLDER.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name} was committed with output"
