"""Every Python block of the README runs, in order, in one namespace."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    return {}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, namespace):
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), namespace)
    if "reward = step(params" in BLOCKS[number]:
        assert namespace["reward"] > 0.9, "the example says it learns"


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_is_short(number):
    code = [line for line in BLOCKS[number].splitlines() if line.strip()]
    assert len(code) <= 30


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (Path(__file__).parent.parent / target).exists(), target
