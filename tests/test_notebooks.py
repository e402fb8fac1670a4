"""Every notebook runs from top to bottom, and says what it promises."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "colab"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    notebook = nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path_factory.mktemp("colab"))}}
    )
    return client.execute()


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


def test_notebooks_are_committed_without_output():
    for path in FOLDER.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name} was committed with output"
