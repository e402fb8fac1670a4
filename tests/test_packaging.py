"""What is shipped: metadata, version, types, and a wheel with everything in it."""

import importlib.metadata
import importlib.resources
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import agentrl_jax

REPOSITORY = Path(__file__).parent.parent
IN_REPOSITORY = (REPOSITORY / "pyproject.toml").is_file()
needs_repository = pytest.mark.skipif(not IN_REPOSITORY, reason="not run from the repository")


def requirements():
    return [Requirement(line) for line in importlib.metadata.requires("agentrl-jax") or []]


def test_metadata():
    meta = importlib.metadata.metadata("agentrl-jax")
    assert meta["Name"] == "agentrl-jax"
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["Summary"]
    assert set(meta.get_all("Provides-Extra") or ()) >= {"test", "cuda", "tpu"}


def test_version_agrees():
    assert agentrl_jax.__version__ == importlib.metadata.version("agentrl-jax")
    assert re.fullmatch(r"\d+\.\d+\.\d+", agentrl_jax.__version__)


def test_dependencies_have_a_floor_and_no_cap():
    core = [item for item in requirements() if item.marker is None]
    assert {"jax", "flax", "optax", "chex", "orbax-checkpoint", "numpy", "sentencepiece", "absl-py"} <= {
        i.name for i in core
    }
    for item in core:
        assert [spec.operator for spec in item.specifier] == [">="], str(item)
        assert item.specifier.contains(importlib.metadata.version(item.name), prereleases=True), str(item)


def test_types_are_shipped():
    assert importlib.resources.files("agentrl_jax").joinpath("py.typed").is_file()


@needs_repository
def test_wheel_holds_every_module(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"agentrl_jax-{agentrl_jax.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    code = {path.relative_to(source / "src").as_posix() for path in (source / "src" / "agentrl_jax").rglob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == {*code, "agentrl_jax/py.typed"}
    assert any(name.endswith("LICENSE") for name in names)
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text()
    assert (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[0] in metadata


@needs_repository
def test_changelog_names_the_version():
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text
    assert f"## [{agentrl_jax.__version__}]" in text


@needs_repository
def test_ci_runs_what_the_readme_says():
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    for command in ("pip install --quiet -e '.[test]'", "ruff check", "ruff format --check", "pyright", "--wheel"):
        assert command in script
    assert subprocess.run(["bash", "-n", str(REPOSITORY / ".ci" / "run")]).returncode == 0
