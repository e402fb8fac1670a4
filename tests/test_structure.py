"""Arrows point one way, imports touch no device, and the public surface is documented and typed."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_jax

ROOT = Path(agentrl_jax.__file__).parent
TESTS = Path(__file__).parent

# Which group a module belongs to: the longest prefix decides. A module that is not listed is "math". To add one, give
# it a line here; to add an arrow, extend ARROWS.
GROUPS = {
    "types": "contract",
    "control": "contract",
    "checks": "contract",
    "policy": "contract",
    "envs.base": "contract",
    "codecs.base": "contract",
    "text": "text",
    "bigint": "text",
    "expression": "text",
    "envs": "envs",
    "codecs": "codecs",
    "models": "models",
    "sampling": "sampling",
    "stream": "rollout",
    "game": "rollout",
    "turns": "rollout",
    "rollout": "rollout",
    "scoring": "scoring",
    "algorithm": "algorithms",
    "algorithms": "algorithms",
    "parts": "algorithms",
    "episodes": "algorithms",
    "collect": "algorithms",
    "history": "algorithms",
    "replay": "algorithms",
    "trees": "algorithms",
    "credit": "algorithms",
    "shaping": "algorithms",
    "filters": "algorithms",
    "rewards": "algorithms",
    "pairs": "algorithms",
    "surrogates": "algorithms",
    "stages": "algorithms",
    "objectives": "algorithms",
    "update": "update",
    "evaluate": "evaluate",
    "train": "train",
    "parallel": "parallel",
    "files": "host",
    "manifest": "host",
    "storage": "host",
    "checkpoint": "host",
    "logging": "host",
    "plotting": "host",
    "transcript": "host",
    "intervals": "host",
}

# What a group may import, beside itself. "math" is advantages, groups, losses, preference, masked, metrics, ...
ARROWS = {
    "contract": set(),
    "math": {"contract"},
    "text": {"contract"},
    "envs": {"contract", "text"},
    "codecs": {"contract"},
    "models": {"contract"},
    "sampling": {"contract", "math"},
    "rollout": {"contract", "math", "text", "sampling"},
    "scoring": {"contract", "math", "sampling"},
    "algorithms": {"contract", "math", "scoring"},
    "update": {"contract", "math", "scoring", "algorithms"},
    "evaluate": {"contract", "math", "text", "sampling", "rollout", "scoring"},
    "train": {"contract", "math", "text", "sampling", "rollout", "scoring", "algorithms", "update", "evaluate"},
    "parallel": {"contract", "math", "models", "rollout", "scoring", "algorithms", "update", "evaluate", "train"},
    "host": {"contract"},
}

# Outside names and the only modules that may use them.
RESERVED = {
    "flax": ("models",),
    "orbax": ("storage",),
    "matplotlib": ("plotting",),
    "rich": ("logging",),
    "tensorboardX": ("logging",),
    "jax.sharding": ("parallel",),
    "jax.experimental.shard_map": ("parallel",),
    "jax.experimental.multihost_utils": ("parallel", "checkpoint"),
    "jax.shard_map": ("parallel",),
    "jax.pmap": ("parallel",),
    "jax.distributed": ("parallel",),
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Trees by name below the package: ``envs.base``; the package's own ``__init__`` is ``""``."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def inner_imports(name, tree, *, lazy=True):
    """Modules of this package that a module imports, anywhere in it or only at its top level."""
    found = set()
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import, line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {full.removeprefix("agentrl_jax.") for full in found if full.startswith("agentrl_jax.")}
    return {full if full in modules() else full.rpartition(".")[0] for full in found} - {name}


def outer_names(tree):
    """Dotted names from elsewhere: imported, or reached as attributes of an imported ``jax``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def group(name):
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((GROUPS[prefix] for prefix in prefixes if prefix in GROUPS), "math")


def broken_arrows(name, imports):
    allowed = ARROWS[group(name)] | {group(name)}
    return [
        f"{name} ({group(name)}) imports {other} ({group(other)})" for other in imports if group(other) not in allowed
    ]


def test_arrows_point_one_way():
    broken = [
        line for name, tree in modules().items() if name for line in broken_arrows(name, inner_imports(name, tree))
    ]
    assert not broken, "\n".join(broken)


def test_the_rule_itself_catches_what_it_should():
    assert broken_arrows("masked", {"rollout"})
    assert broken_arrows("losses", {"train"})
    assert broken_arrows("groups", {"envs.calculator"})
    assert broken_arrows("envs.calculator", {"codecs.byte"})
    assert broken_arrows("train", {"checkpoint"})
    assert broken_arrows("models.transformer", {"rollout"})
    assert not broken_arrows("envs.calculator", {"types", "text", "envs.base"})
    assert inner_imports("x", ast.parse("def f():\n  from agentrl_jax import types, train")) == {"types", "train"}
    assert "jax.pmap" in outer_names(ast.parse("import jax\nf = jax.pmap(g)"))
    levels: dict[str, int] = {}
    while len(levels) < len(ARROWS):  # The groups themselves form no cycle.
        free = [name for name in ARROWS if name not in levels and ARROWS[name] <= levels.keys()]
        assert free
        levels |= dict.fromkeys(free, len(levels))


def test_modules_form_no_cycle():
    graph = {name: inner_imports(name, tree, lazy=False) for name, tree in modules().items()}
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_reserved_names_stay_where_they_belong():
    broken = []
    for name, tree in modules().items():
        for used in outer_names(tree):
            for reserved, homes in RESERVED.items():
                at_home = any(name == home or name.startswith(f"{home}.") for home in homes)
                if (used == reserved or used.startswith(f"{reserved}.")) and not at_home:
                    broken.append(f"{name} uses {used}; only {', '.join(homes)} may use {reserved}")
    assert not broken, "\n".join(broken)


def test_import_touches_no_device():
    """Every module imports where no backend can start, and none brings in the host's heavy libraries."""
    code = """
import importlib, sys
import agentrl_jax
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = sorted({"matplotlib", "orbax", "tensorboardX"} & set(sys.modules))
assert not heavy, heavy
"""
    names = [f"agentrl_jax.{name}" for name in modules() if name]
    env = {**os.environ, "JAX_PLATFORMS": "bogus"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def public_functions(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, False
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and (item.name == "__init__" or not item.name.startswith("_")):
                    yield f"{node.name}.{item.name}", item, True


def unannotated(node, method):
    spec = node.args
    named = [*spec.posonlyargs, *spec.args][1 if method else 0 :] + spec.kwonlyargs
    extra = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    missing = [arg.arg for arg in (*named, *extra) if arg.annotation is None]
    return missing + (["return"] if node.returns is None else [])


@pytest.mark.parametrize("name", list(modules()))
def test_public_functions_are_documented_and_annotated(name):
    tree = modules()[name]
    assert ast.get_docstring(tree), f"{name or 'agentrl_jax'} has no docstring"
    for function, node, method in public_functions(tree):
        assert ast.get_docstring(node), f"{name}.{function} has no docstring"
        static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
        missing = unannotated(node, method and not static)
        assert not missing, f"{name}.{function}: {missing} not annotated"


def test_public_names_exist():
    names = getattr(agentrl_jax, "__all__", ())
    assert len(set(names)) == len(names)
    assert not [name for name in names if not hasattr(agentrl_jax, name)]
    assert not [name for name in names if name.startswith("_") and name != "__version__"]


def test_no_machine_paths():
    """No file speaks of the folders of the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "opt", "root", "home")) + r")/\w")
    home = TESTS.parent
    places = [ROOT, TESTS]
    if (home / "pyproject.toml").is_file():
        places += [home / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "setup.cfg", ".ci", "docs")]
        places += [home / name for name in ("experiments", "colab")]
    suffixes = {".py", ".md", ".toml", ".cfg", ".ipynb", ".json", ".jsonl", ""}
    found = []
    for path in (path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*")))):
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path}: {match[0]}" for match in pattern.finditer(text)]
    assert not found, "\n".join(found)
