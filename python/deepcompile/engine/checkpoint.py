"""Saves and loads an engine by torch.distributed.checkpoint: sharded, atomic, for any world size and stage.

A folder holds one folder per checkpoint and the file ``latest``, which names the one to load. A checkpoint is written beside
the others under another name and renamed when it is complete; only then does ``latest`` point to it. So whenever a job is
killed, ``latest`` names a complete checkpoint.

Each parameter, and each optimizer state of a parameter's size, is saved as one flat tensor: the shards of all ranks one
after the other, without padding. So any number of ranks can load it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from deepcompile.safetensors import save_safetensors
from deepcompile.sharding.sharding import ShardedParam, Sharding
from deepcompile.sharding.state_offload import as_large

if TYPE_CHECKING:
    from deepcompile.engine.engine import Engine

_FORMAT = 1
_LATEST = "latest"
#: Holds everything that is not a large tensor (:func:`_metadata`). The name is part of the format.
_METADATA_FILE = "facts.pt"


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, is damaged, or belongs to another model."""


class _Flat:
    """Wraps shards as flat DTensors over the group, which torch.distributed.checkpoint saves and loads."""

    def __init__(self, sharding: Sharding) -> None:
        self._group, self._rank, self._world = sharding.group, sharding.rank, sharding.world
        self._meshes: dict[str, DeviceMesh] = {}

    def _mesh(self, device: torch.device) -> DeviceMesh:
        """The group's mesh for tensors on ``device``. Offloaded states are saved from and loaded into host memory."""
        if device.type not in self._meshes:
            self._meshes[device.type] = DeviceMesh.from_group(self._group, device.type)
        return self._meshes[device.type]

    def of(self, sharded: ShardedParam, shard: torch.Tensor) -> DTensor:
        """The shard's elements without padding, as a view; a copy if the shard is not contiguous."""
        size = shard.numel()
        valid = max(0, min(size, sharded.numel - self._rank * size))
        return DTensor.from_local(
            shard.detach().reshape(-1)[:valid],
            self._mesh(shard.device),
            [Shard(0)],
            run_check=False,
            shape=torch.Size([sharded.numel]),
            stride=(1,),
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed.checkpoint's deprecation warnings about itself
        yield


def save_checkpoint(
    engine: Engine, folder: str | os.PathLike[str], tag: str | None, client_state: Any, keep: int | None
) -> str:
    if engine.gradients_pending:
        raise RuntimeError("save_checkpoint between backwards of one accumulation: save after the step that ends it")
    sharding = engine.sharding
    root = pathlib.Path(folder)
    _check_tag(tag)
    progress = engine.progress()  # before engine.steps is read: it may find that the device skipped the last update
    name = _agree_on_name(sharding, root, tag or f"step-{engine.steps}")
    unfinished = root / f".unfinished-{name}"
    flat = _Flat(sharding)
    tensors: dict[str, Any] = {f"model/{s.name}": flat.of(s, s.param) for s in sharding.params}
    tensors |= {f"buffer/{n}": value for n, value in engine.module.named_buffers()}
    if engine.offload is not None:
        sharding.runtime.states.settle()
    states: dict[str, dict[str, Any]] = {}
    for sharded in sharding.params:
        state = _optimizer_state(engine, sharded)
        large = as_large(sharded.param, state)
        tensors |= {f"optimizer/{sharded.name}/{slot}": flat.of(sharded, value) for slot, value in large.items()}
        numbers = {slot: value for slot, value in state.items() if slot not in large}
        states |= {sharded.name: numbers} if numbers else {}
    metadata = io.BytesIO()
    try:
        if sharding.rank == 0:
            torch.save(_metadata(engine, progress, states, client_state), metadata)
    except Exception as error:  # client_state cannot be pickled: tells the other ranks, which wait for rank 0's files
        sharding.transfers.fail(error)
        raise
    sharding.transfers.meet("is about to write a checkpoint")
    with _quietly():
        save(tensors, checkpoint_id=unfinished, process_group=sharding.group)
    torch.save(torch.get_rng_state(), unfinished / f"random-{sharding.rank}.pt")
    if sharding.runtime.device.type == "cuda":
        torch.save(torch.cuda.get_rng_state(sharding.runtime.device), unfinished / f"random-cuda-{sharding.rank}.pt")
    if sharding.rank == 0:
        (unfinished / _METADATA_FILE).write_bytes(metadata.getbuffer())
    dist.barrier(group=sharding.group)  # every rank's files are there
    if sharding.rank == 0:
        _sync(unfinished)
        os.rename(unfinished, root / name)
        _point_to(root, name)
        _remove_old(root, name, keep)
    dist.barrier(group=sharding.group)
    return str(root / name)


def _metadata(engine: Engine, progress: dict[str, Any], states: dict[str, Any], client_state: Any) -> dict[str, Any]:
    """Everything that a checkpoint holds beside the large tensors of the model and the optimizer."""
    sharding = engine.sharding
    return {
        "format": _FORMAT,
        "world": sharding.world,
        "params": {s.name: (tuple(s.full_shape), s.original_dtype) for s in sharding.params},
        "ties": {n: s.name for s in sharding.params for n in _names(engine, s)},
        "optimizer": {"states": states, "groups": _groups(engine)},
        "engine": progress,
        "client": client_state,
    }


def _check_tag(tag: Any) -> None:
    if tag is not None and not isinstance(tag, str):
        raise TypeError(
            f"the tag of a checkpoint is its name, not a {type(tag).__name__}; what is to be saved beside the model goes "
            "into client_state=..."
        )
    if tag is not None and (not tag or tag == _LATEST or tag.startswith(".") or pathlib.PurePath(tag).name != tag):
        raise ValueError(f"{tag!r} cannot name a checkpoint: it must be a folder's plain name, other than '{_LATEST}'")


def _agree_on_name(sharding: Sharding, root: pathlib.Path, wanted: str) -> str:
    """``wanted``, with a number appended if a checkpoint has that name already. Rank 0 chooses, and deletes the unfinished
    folders of killed jobs.
    """
    name = [""]
    if sharding.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        for abandoned in root.glob(".unfinished-*"):
            shutil.rmtree(abandoned)
        taken = {path.name for path in root.iterdir()}
        candidates = itertools.chain([wanted], (f"{wanted}-{n}" for n in itertools.count(2)))
        name = [next(candidate for candidate in candidates if candidate not in taken)]
    dist.broadcast_object_list(name, dist.get_global_rank(sharding.group, 0), group=sharding.group)
    return name[0]


def _names(engine: Engine, sharded: ShardedParam) -> list[str]:
    return [n for n, p in engine.module.named_parameters(remove_duplicate=False) if p is sharded.param]


def _optimizer_state(engine: Engine, sharded: ShardedParam) -> dict[str, Any]:
    return engine.optimizer.state.get(sharded.param, {}) if engine.optimizer is not None else {}


def _groups(engine: Engine) -> list[dict[str, Any]]:
    """The settings of each group of the optimizer, with its parameters by name."""
    if engine.optimizer is None:
        return []
    names = {s.param: s.name for s in engine.sharding.params}
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names.get(p, "") for p in group["params"]]}
        for group in engine.optimizer.param_groups
    ]


def _sync(folder: pathlib.Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _point_to(root: pathlib.Path, name: str) -> None:
    unfinished = root / f".{_LATEST}"
    unfinished.write_text(name)
    _sync(root)
    os.replace(unfinished, root / _LATEST)


def _remove_old(root: pathlib.Path, name: str, keep: int | None) -> None:
    if keep is None:
        return
    others = sorted(
        (p.parent for p in root.glob(f"*/{_METADATA_FILE}") if p.parent.name != name),
        key=lambda path: path.stat().st_mtime_ns,
    )
    for path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path)


def find_checkpoint(folder: str | os.PathLike[str], name: str | None = None) -> pathlib.Path:
    root = pathlib.Path(folder)
    if name is None:
        if not (root / _LATEST).is_file():
            raise CheckpointError(f"{root} holds no checkpoint: there is no file '{_LATEST}' in it")
        name = (root / _LATEST).read_text().strip()
    if not (root / name / _METADATA_FILE).is_file():
        there = ", ".join(sorted(path.parent.name for path in root.glob(f"*/{_METADATA_FILE}"))) or "none"
        raise CheckpointError(f"there is no checkpoint '{name}' in {root}; there are: {there}")
    return root / name


def load_checkpoint(engine: Engine, folder: str | os.PathLike[str], tag: str | None) -> tuple[str, Any]:
    sharding = engine.sharding
    path = find_checkpoint(folder, tag)
    metadata = _read_metadata(path)
    _check_model(sharding, metadata, path)
    if engine.optimizer is not None:
        _load_groups(engine, metadata["optimizer"]["groups"], path)
    flat = _Flat(sharding)
    tensor_metadata = _tensors_in(path)
    wanted: dict[str, torch.Tensor] = {f"model/{s.name}": s.param for s in sharding.params}
    tensors: dict[str, Any] = {f"model/{s.name}": flat.of(s, s.param) for s in sharding.params}
    tensors |= {k: v for n, v in engine.module.named_buffers() if (k := f"buffer/{n}") in tensor_metadata}
    if engine.optimizer is not None:
        on_host = {"device": "cpu", "pin_memory": sharding.runtime.device.type == "cuda"}
        place: dict[str, Any] = {} if engine.offload is None else on_host
        groups = (g for g in engine.optimizer.param_groups if g.get("fused") or g.get("capturable"))
        large = _large_states(tensor_metadata)
        step_on_device = {param for group in groups for param in group["params"]}
        for sharded in sharding.params:
            engine.optimizer.state.pop(sharded.param, None)  # states that the checkpoint lacks go, too
            slots, numbers = large.get(sharded.name, {}), metadata["optimizer"]["states"].get(sharded.name, {})
            state = engine.optimizer.state[sharded.param] if slots or numbers else {}
            for slot, key in slots.items():
                value = torch.zeros_like(sharded.param.detach(), dtype=tensor_metadata[key].properties.dtype, **place)
                state[slot] = wanted[key] = value
                tensors[key] = flat.of(sharded, value)
            state.update(_placed(numbers, sharded.param.device, sharded.param in step_on_device))
    sharding.runtime.end_reads()
    with torch.no_grad(), _quietly():
        load(tensors, checkpoint_id=path, process_group=sharding.group)
        for key, tensor in wanted.items():
            _fill(tensor.detach(), tensors[key].to_local())
        for sharded in sharding.params:
            sharded.param.add_(0)  # increments the version, which makes gathered copies stale
    sharding.runtime.clear_all_gathered_params()
    engine.load_progress(metadata["engine"])
    random = path / f"random-{sharding.rank}.pt"
    if metadata["world"] == sharding.world and random.is_file():
        torch.set_rng_state(torch.load(random))
        on_device = path / f"random-cuda-{sharding.rank}.pt"
        if sharding.runtime.device.type == "cuda" and on_device.is_file():
            torch.cuda.set_rng_state(torch.load(on_device, map_location="cpu"), sharding.runtime.device)
    return str(path), metadata["client"]


def _fill(tensor: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copies what was loaded into ``tensor``, unless it was loaded in place (``_Flat.of`` gave a view)."""
    if not tensor.is_contiguous():
        tensor.copy_(loaded.view(tensor.shape))
    elif loaded.data_ptr() != tensor.data_ptr():
        tensor.view(-1)[: loaded.numel()].copy_(loaded)


def _placed(states: Mapping[str, Any], device: torch.device, step_on_device: bool) -> dict[str, Any]:
    """Scalar states on the device where the optimizer keeps them: ``step`` on the CPU unless ``step_on_device``, as for
    fused and capturable optimizers.
    """

    def moves(slot: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (slot != "step" or step_on_device)

    return {slot: value.to(device) if moves(slot, value) else value for slot, value in states.items()}


def _read_metadata(path: pathlib.Path) -> dict[str, Any]:
    # Its tensors are small. They were saved from rank 0's device, which may not exist here.
    metadata: dict[str, Any] = torch.load(path / _METADATA_FILE, weights_only=False, map_location="cpu")
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is of format {metadata.get('format')}; this version reads format {_FORMAT}")
    return metadata


def _tensors_in(path: pathlib.Path) -> dict[str, TensorStorageMetadata]:
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: value for key, value in found.items() if isinstance(value, TensorStorageMetadata)}


def _large_states(metadata: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The keys of states of a parameter's size, by the parameter's name (which may have any character) and the state's."""
    found: dict[str, dict[str, str]] = {}
    for key in metadata:
        kind, _, place = key.partition("/")
        if kind == "optimizer":
            name, _, slot = place.rpartition("/")
            found.setdefault(name, {})[slot] = key
    return found


def _check_model(sharding: Sharding, metadata: dict[str, Any], path: pathlib.Path) -> None:
    saved = {name: shape for name, (shape, _) in metadata["params"].items()}
    own = {s.name: tuple(s.full_shape) for s in sharding.params}
    for name in (*own, *saved):
        if saved.get(name) != own.get(name):
            raise CheckpointError(
                f"{path} belongs to another model: parameter '{name}' is {_shape(saved.get(name))} there and "
                f"{_shape(own.get(name))} here"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _load_groups(engine: Engine, groups: list[dict[str, Any]], path: pathlib.Path) -> None:
    own = _groups(engine)
    if [group["params"] for group in own] != [group["params"] for group in groups]:
        raise CheckpointError(f"{path}: the optimizer's groups hold other parameters than this engine's")
    assert engine.optimizer is not None
    for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def consolidate(folder: str | os.PathLike[str], out: str | os.PathLike[str], name: str | None = None) -> int:
    """Writes the whole parameters of a checkpoint as one safetensors file; needs no process group. Returns how many tensors
    were written.
    """
    path = find_checkpoint(folder, name)
    metadata = _read_metadata(path)
    tensor_metadata = _tensors_in(path)
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in tensor_metadata.items()
        if key.startswith(("model/", "buffer/"))
    }
    with _quietly():
        load(tensors, checkpoint_id=path, no_dist=True)
    result = {
        tied: tensors[f"model/{param}"].reshape(metadata["params"][param][0]).to(metadata["params"][param][1])
        for tied, param in metadata["ties"].items()
    }
    result |= {key.removeprefix("buffer/"): value for key, value in tensors.items() if key.startswith("buffer/")}
    save_safetensors(result, out)
    return len(result)
