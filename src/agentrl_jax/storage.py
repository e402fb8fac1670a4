"""A train state as named arrays on disk: what each leaf is, how it is stored, how it comes back.

Orbax holds the arrays; typed keys go in as their key data. A description of every leaf (path, kind, shape, dtype or key
implementation) is kept beside them, and is compared before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.manifest import CheckpointError
from agentrl_jax.types import PyTree


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays with Orbax and returns when they are committed."""
    import orbax.checkpoint as ocp

    # The extra entry keeps a state without arrays from being an empty tree, which Orbax refuses.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(path.absolute(), args=ocp.args.PyTreeSave(arrays | {"format": np.asarray(1)}))


def load_arrays(path: Path, leaves: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Arrays by leaf path, after the storage's own headers agree with the manifest."""
    import orbax.checkpoint as ocp

    # Of a relative path Orbax gives no metadata.
    where = path.absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        headers = _guard(path, lambda: reader.metadata(where).item_metadata.tree)
        for leaf in leaves:
            _check_header(path, leaf, headers.get(leaf["name"]))
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in headers}
        stored = _guard(path, lambda: reader.restore(where, args=ocp.args.PyTreeRestore(restore_args=restore_args)))
    return {leaf["path"]: np.asarray(stored[leaf["name"]]) for leaf in leaves}


def _check_header(path: Path, leaf: dict[str, Any], header: Any) -> None:
    shape = [] if header is None else list(header.shape)
    if leaf["kind"] == "key":  # Key data has one axis more than the keys.
        fits = len(shape) == len(leaf["shape"]) + 1 and shape[:-1] == leaf["shape"] and shape[-1] <= 16
    else:
        fits = header is not None and shape == leaf["shape"] and np.dtype(header.dtype).name == leaf["dtype"]
    if not fits:
        raise CheckpointError(f"{path}: {leaf['path']} is stored as {header}, its manifest says {_spell(leaf)}")


def _guard(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> str:
    """The implementation's name, also of an abstract key: only a traced one can be asked."""
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), leaf)
    return names[0]


def describe(path: tuple[Any, ...], leaf: Any) -> dict[str, Any]:
    """What the manifest says of a leaf: path, kind, shape, and dtype (of a key: its implementation).

    Raises:
      CheckpointError: the leaf is no number, array or key.
    """
    name = jax.tree_util.keystr(path)
    if _is_key(leaf):
        return {"path": name, "kind": "key", "shape": list(leaf.shape), "dtype": _key_impl(leaf)}
    if type(leaf) in (bool, int, float):
        return {"path": name, "kind": type(leaf).__name__, "shape": [], "dtype": np.asarray(leaf).dtype.name}
    dtype = getattr(leaf, "dtype", None)
    number = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    if not number:
        raise CheckpointError(
            f"{name} is a {type(leaf).__name__} {dtype or ''}; only numbers, arrays and keys are saved"
        )
    return {"path": name, "kind": "array", "shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def stored(leaf: Mapping[str, Any]) -> bool:
    """Whether a leaf has data on disk: an empty array has none, its shape says everything."""
    return 0 not in leaf["shape"]


def _array_name(index: int, path: str) -> str:
    return f"{index:05d}_" + re.sub(r"[^A-Za-z0-9]+", "_", path).strip("_")


def to_host(state: PyTree) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Descriptions of all leaves, and copies of their data by storage name.

    Raises:
      CheckpointError: a leaf that cannot be saved, named by its path.
    """
    leaves, arrays = [], {}
    for path, value in jax.tree.flatten_with_path(state)[0]:
        leaf = describe(path, value)
        if leaf["kind"] == "int" and leaf["dtype"] != "int64":
            raise CheckpointError(f"{leaf['path']} is {value}, which does not fit 64 bits")
        leaf["name"] = _array_name(len(leaves), leaf["path"])
        if stored(leaf):
            arrays[leaf["name"]] = _host_copy(jax.random.key_data(value) if leaf["kind"] == "key" else value)
        leaves.append(leaf)
    return leaves, arrays


def _host_copy(value: Any) -> Any:
    """A NumPy copy that no donation can touch; an array spread over processes stays as it is, to be written by all."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.array(value.addressable_data(0)) if value.is_fully_replicated else value
    return np.array(value)


def compare(folder: Path, found: list[dict[str, Any]], wanted: list[dict[str, Any]], show: int = 5) -> None:
    """Copies storage names into ``wanted``, when both describe the same leaves.

    Raises:
      CheckpointError: they differ; the first ``show`` differences are named.
    """
    saved = {leaf["path"]: leaf for leaf in found}
    expected = {leaf["path"]: leaf for leaf in wanted}
    problems = [
        f"{path}: expected {_spell(leaf)}, found nothing" for path, leaf in expected.items() if path not in saved
    ]
    problems += [
        f"{path}: found {_spell(leaf)}, expected nothing" for path, leaf in saved.items() if path not in expected
    ]
    for path, leaf in expected.items():
        other = saved.get(path, leaf)
        if any(leaf[field] != other[field] for field in ("kind", "shape", "dtype")):
            problems.append(f"{path}: expected {_spell(leaf)}, found {_spell(other)}")
        leaf["name"] = other.get("name")
    if problems:
        more = f"\n  and {len(problems) - show} more" if len(problems) > show else ""
        raise CheckpointError(f"{folder} does not fit the state:\n  " + "\n  ".join(problems[:show]) + more)


def _spell(leaf: Mapping[str, Any]) -> str:
    return f"{leaf['kind']} {leaf['dtype']}{leaf['shape']}"


def place(data: np.ndarray | None, like: Any) -> Any:
    """The stored data (None of an empty array) as the kind of leaf ``like`` is, on its sharding when it has one.

    Raises:
      CheckpointError: a 64-bit array, and 64-bit arrays are off.
    """
    data = _empty(like) if data is None else data
    if type(like) in (bool, int, float):
        return type(like)(data.item())
    if isinstance(like, np.ndarray | np.generic):
        return data if isinstance(like, np.ndarray) else like.dtype.type(data[()])
    sharding = getattr(like, "sharding", None)
    if isinstance(like, jax.Array) and not like.committed:
        sharding = None  # Committing it to a device would make the resumed program compile again.
    if not _is_key(like):
        return _on_device(data, sharding)
    # Over several processes the key data take the sharding of the keys: their last axis is one more, and unsharded.
    spread = sharding is not None and not sharding.is_fully_addressable
    keys = jax.random.wrap_key_data(_on_device(data, sharding if spread else None), impl=_key_impl(like))
    return keys if spread or sharding is None else jax.device_put(keys, sharding)


def _empty(like: Any) -> np.ndarray:
    raw: Any = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return np.empty(raw.shape, raw.dtype)


def _on_device(data: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is not None and not sharding.is_fully_addressable:
        return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
    value = jax.device_put(data, sharding, may_alias=False)
    if value.dtype != data.dtype:
        raise CheckpointError(f"{data.dtype} became {value.dtype}: restore it with jax_enable_x64, as it was saved")
    return value
