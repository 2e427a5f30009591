"""Shards the parameters of any ``nn.Module`` over a process group, in place.

Each parameter object stays where it is, in its modules and in the groups of its optimizer, but holds this rank's part of
the flattened parameter from then on (:attr:`full_shape` is its shape as a whole). The classes of the modules become
subclasses whose properties read a parameter through an operator that gathers it and whose autograd formula reduces its
gradient. So forward code sees whole weights, in eager mode and under torch.compile alike.

ZeRO-1 and 2 are the same with parameters that stay gathered from update to update; ZeRO-1 also lets gradients add up on each
rank until the backward before an update.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from deepcompile.config.config import Config, accumulation_steps, load_config
from deepcompile.runtime import channels, dc
from deepcompile.runtime.group_transfers import GroupTransfers, slice_of
from deepcompile.runtime.process_group import resolve_or_make
from deepcompile.sharding import shard_aware_torch, sharded_modules
from deepcompile.sharding.deferred import InitFunction, make_shards
from deepcompile.sharding.model_agreement import Identity, agree_on_model
from deepcompile.sharding.shard_parameter import make_shard, refuse_direct_gradient
from deepcompile.sharding.state_shards import Origin

if TYPE_CHECKING:
    from deepcompile.planning.step_planner import CompiledCall, StepPlanner
    from deepcompile.sharding.state_offload import StateOffload

_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A sharded parameter. ``param`` holds this rank's part, flat and padded to the same size on all ranks; the whole of it,
    in its own shape, where one rank has everything.
    """

    id: int
    name: str
    full_shape: torch.Size
    original_dtype: torch.dtype
    #: What a module sees: the dtype that the gather casts to.
    read_dtype: torch.dtype
    param: nn.Parameter
    #: Every (module, attribute) that holds it: more than one where it is tied.
    places: tuple[tuple[nn.Module, str], ...]
    #: Stays gathered from update to update.
    persistent: bool
    #: Belongs to a leaf module: gathered at its entry, on every rank, and kept until the backward ends.
    leaf: bool

    @property
    def numel(self) -> int:
        return self.full_shape.numel()

    @property
    def flat(self) -> torch.Tensor:
        """This rank's part, flat, in the parameter's memory."""
        return self.param.detach().view(-1)


class Sharding:
    """What was done to one model: its runtime, its graph and its parameters."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        group: dist.ProcessGroup,
        identity: Identity,
        transfers: GroupTransfers,
    ) -> None:
        self.config = config
        self.group = group
        #: What one rank sends the others outside the steps, and where they meet for it.
        self.transfers = transfers
        self.rank, self.world = group.rank(), group.size()
        #: Of the graph that holds every parameter.
        self.graph_id = identity.graph_id
        self.serial = identity.serial
        self.runtime = dc.Runtime(
            group,
            {
                "timeout": config.timeout,
                "pre_div_reduce": config.prescale_gradients,
                "debug": config.debug,
                "symmetric_memory": config.symmetric_memory,
                "registered_memory": config.registered_memory,
            },
            config.zero_optimization.reduce_bucket_size or _bucket_size(model),
            device=_device_of(model, group),
        )
        #: One rank has everything: modules read its parameters as they are, and autograd leaves their gradients on them.
        self.whole = self.world == 1 and not config.zero_optimization.gather_at_one_rank
        #: Whether memory for gradients is taken when they come, and goes with the update: an engine's choice.
        self.lets_gradients_go = False
        #: Moves an optimizer's states to the host and back: an engine's choice, for which the planner plans.
        self.offload: StateOffload | None = None
        self.params: list[ShardedParam] = []
        self.steps_begun = 0  # of the engine
        #: Runs of compiled graphs that train, while somebody wants to know of them.
        self.calls: list[CompiledCall] | None = None
        self._trained: list[bool] = []  # what the runtime has gradient buffers for
        self._refusing: set[int] = set()  # parameters that refuse a gradient of the shard itself
        self._model = weakref.ref(model)
        self._planner: StepPlanner | None = None

    @property
    def living_model(self) -> nn.Module | None:
        """None when nobody holds it any more, although parts of it may live on."""
        return self._model()

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the sharded model is gone")
        return model

    @property
    def planner(self) -> StepPlanner:
        """Made at its first use, which is a collective: when the model is compiled."""
        if self._planner is None:
            from deepcompile.planning.step_planner import StepPlanner

            self._planner = StepPlanner(self)
        return self._planner

    @property
    def is_planned(self) -> bool:
        """Whether a planner was made, from the configuration as it was then."""
        return self._planner is not None

    @property
    def reads_what_it_has(self) -> bool:
        """True in the steps of an engine on one rank: a gather is the parameter itself, and there is nothing to plan."""
        in_place = os.environ.get("DEEPCOMPILE_READ_IN_PLACE", "auto") != "off"
        return self.world == 1 and self.steps_begun > 0 and in_place and self.config.compile.mode == "compile"

    @property
    def collectives_stop_compute(self) -> bool:
        """True where they run on the thread of the caller."""
        return self.runtime.device.type == "cpu" and self.runtime.stats()["cpu_stream"] == "inline"

    def by_parameter(self) -> dict[nn.Parameter, ShardedParam]:
        return {sharded.param: sharded for sharded in self.params}

    def register(self) -> None:
        """Tells the runtime of all parameters; the ranks agree on them at the first gather."""
        for sharded in self.params:
            self.runtime.register_z3_param(
                sharded.id,
                sharded.full_shape,
                sharded.flat if self.whole else sharded.param,  # on which the runtime puts the gradient
                self._gradient_buffer(sharded.param),
                sharded.persistent,
                name=sharded.name,
                reduce_dtype=self.config.reduce_dtype,
            )
        self._trained = [sharded.param.requires_grad for sharded in self.params]
        self._refuse_direct_gradients()
        ids = [sharded.id for sharded in self.params]
        self.runtime.register_graph_z3(self.graph_id, ids, reduce_at_update=self.config.stage == 1)

    def _refuse_direct_gradients(self) -> None:
        for sharded in self.params if not self.whole else ():
            if sharded.param.requires_grad and sharded.id not in self._refusing:
                self._refusing.add(sharded.id)
                refuse_direct_gradient(sharded.param, sharded.name, f"rank {self.rank} of {self.world}")

    def _gradient_buffer(self, param: nn.Parameter) -> torch.Tensor | None:
        """Where the gradient of this rank's part goes; None for a frozen parameter. Sums over several backwards are in 32
        bits; a single gradient needs no more than PyTorch gives it.
        """
        if not param.requires_grad or self.whole:
            return None
        return torch.zeros_like(param, dtype=self.sum_dtype(param), requires_grad=False)

    def sum_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Of the parameter's gradient buffer."""
        several = (self.config.gradient_accumulation_steps or 1) > 1
        return torch.float32 if param.dtype in _HALF and several else param.dtype

    def _changed_trainable(self) -> list[ShardedParam]:
        return [s for s, trained in zip(self.params, self._trained, strict=True) if s.param.requires_grad != trained]

    def changed_trainable(self) -> list[str]:
        """Parameters of which the runtime has not been told yet that they are frozen or trained."""
        return [sharded.name for sharded in self._changed_trainable()]

    def update_trainable(self) -> list[str]:
        """Parameters that were frozen and no longer are get a gradient buffer; those that are frozen now lose theirs. The
        names of both. Every rank calls it, between steps; the ranks agree on it at the next forward.
        """
        changed = self._changed_trainable()
        for sharded in changed:
            param = sharded.param
            if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
                raise ValueError(f"parameter '{sharded.name}' of dtype {param.dtype} requires a gradient")
            if not self.whole:
                self.runtime.set_grad_buffer(
                    sharded.id, self._gradient_buffer(param), reduce_dtype=self.config.reduce_dtype
                )
            param.grad = None
            sharded_modules.trains_otherwise(sharded)
        if not changed:
            return []
        self._trained = [sharded.param.requires_grad for sharded in self.params]
        self._refuse_direct_gradients()
        if self._planner is not None:
            self._planner.learn_facts()
        return [sharded.name for sharded in changed]

    def gather(self, sharded: ShardedParam, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole copy of the parameter, in ``dtype`` (the shard's own when None), of which the caller is the only owner.
        Every rank calls it.
        """
        if self.whole:
            return sharded.param.detach().to(dtype or sharded.param.dtype, copy=True)
        with torch.no_grad(), self.runtime.outside_step():
            whole: torch.Tensor = torch.ops.dc.gather_shard(
                sharded.param, self.graph_id, list(sharded.full_shape), dtype or sharded.param.dtype
            )
            return whole.clone()

    def slice_of(self, sharded: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, padded with zeros."""
        return slice_of(whole, self.rank, self.world)

    def origin(self, sharded: ShardedParam) -> Origin:
        """Of this rank's part."""
        return Origin(f"parameter '{sharded.name}'", sharded.full_shape, self.rank, self.world)

    def end_backward(self) -> None:
        """Leaf modules keep their parameters until here."""
        for sharded in self.params:
            if sharded.leaf and not sharded.persistent:
                self.runtime.invalidate_gathered_param(sharded.id)

    @property
    def is_open(self) -> bool:
        return self.runtime.is_open

    def close(self) -> None:
        self.runtime.cleanup()


def _device_of(model: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Where the model lives, or is going to be made: where its buffers are, or where the group's tensors would be."""
    parameters, buffers = (
        sorted({tensor.device for tensor in tensors} - {torch.device("meta")}, key=str)
        for tensors in (model.parameters(), model.buffers())
    )
    there = parameters or buffers
    if len(there) > 1:
        kind = "parameters" if parameters else "buffers"
        raise ValueError(
            f"the {kind} of {type(model).__name__} are on {there[0]} and {there[1]}; move the model to one device "
            "before it is sharded: each rank trains on one"
        )
    return there[0] if there else channels.default_device(group)


def _bucket_size(model: nn.Module) -> int:
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return min(max(trainable // 8, 250_000), 50_000_000)


_shardings: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()


def sharding_of(model: nn.Module) -> Sharding:
    """The sharding of a model that :func:`shard` was given, or of any part of it."""
    found = _shardings.get(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is not sharded: call deepcompile.shard(model, config) or deepcompile.initialize first"
        )
    return found


def update_trainable(model: nn.Module) -> list[str]:
    """After ``requires_grad_`` of sharded parameters in the plain loop (an engine sees it by itself): tells the runtime what
    is trained from now on. Every rank calls it, between steps. The names of the parameters that changed.
    """
    return sharding_of(model).update_trainable()


def is_sharded(model: nn.Module) -> bool:
    return model in _shardings


def open_shardings() -> Iterator[Sharding]:
    return iter({sharding for sharding in _shardings.values() if sharding.runtime.is_open})


def shard(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    init_fn: InitFunction | None = None,
) -> nn.Module:
    """Shards ``model`` in place over ``process_group`` and returns it. Every rank calls it; the values are those of rank 0.
    Without ``process_group`` it is the default group; where there is none, one is made: of the launcher's ranks (torchrun),
    else of this process alone. Optimizers may be made before or after: parameters keep their identity, except those
    without data (:func:`deepcompile.init_sharded`, device ``meta``), which are made here, module by module, by ``init_fn``
    or as the module does it itself.
    """
    checked = load_config(config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard takes a torch.nn.Module, not {type(model).__name__}")
    group = resolve_or_make(process_group)
    checked.gradient_accumulation_steps = accumulation_steps(checked, group.size())
    transfers = GroupTransfers(group, checked.timeout)
    try:
        _check_modules(model)
        found = _find_params(model, checked)
        if group.size() > 1:  # one rank has everything: autograd leaves gradients on the parameters
            _check_hooks(found)
    except Exception as error:
        transfers.fail(error)
        raise
    transfers.meet(f"is about to shard a {type(model).__name__}")
    entries = [(s.name, tuple(s.full_shape), str(s.original_dtype), s.param.requires_grad) for s in found]
    entries += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    sharding = Sharding(model, checked, group, agree_on_model(entries, group), transfers)
    without_data = [*(sharded.param for sharded in found), *model.buffers()]
    device = sharding.runtime.device
    made = make_shards(model, init_fn, group, device) if any(tensor.is_meta for tensor in without_data) else {}
    for sharded in found:
        if sharded.param.is_meta:
            sharding.params.append(_put_shard(sharded, made.pop(sharded.param), sharding))
        else:
            _replace_by_shard(sharded, sharding)
            sharding.params.append(sharded)
    for name, buffer in model.named_buffers():
        if buffer.numel() > 0 and group.size() > 1:
            transfers.broadcast(buffer, 0, f"buffer '{name}'")
    if not sharding.whole:
        for sharded in sharding.params:
            _refuse_hooks(sharded)
            if sharding.world > 1:
                sharded.param.origin = sharding.origin(sharded)  # type: ignore[attr-defined]
    sharding.register()
    sharded_modules.install(sharding)
    for module in model.modules():
        _shardings[module] = sharding
    shard_aware_torch.install()
    return model


def _check_modules(model: nn.Module) -> None:
    for module in model.modules():
        if is_sharded(module):
            raise ValueError(f"{type(module).__name__} is sharded already; shard each model once, as a whole")
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(f"a {type(module).__name__} averages gradients itself: shard the model inside it (.module)")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a TorchScript module cannot be sharded; shard the Python module that it was made from")


def _find_params(model: nn.Module, config: Config) -> list[ShardedParam]:
    leaves = _leaf_parameters(model, config.zero_optimization.leaf_modules)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module, key))
                names.setdefault(param, f"{path}.{key}" if path else key)
    for param, name in names.items():
        _check_param(name, param)
    if not any(param.numel() > 0 for param in places):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    found: list[ShardedParam] = []
    memory: dict[int, str] = {}
    for param, where in places.items():
        name = names[param]
        if param.numel() == 0:
            continue  # nothing to gather, nothing to reduce: it stays as it is
        other = memory.setdefault(param.data_ptr(), name)
        if other != name and not param.is_meta:
            raise ValueError(
                f"parameters '{other}' and '{name}' are different objects over the same memory; tie them by assigning one "
                "Parameter object to both modules"
            )
        read_dtype = param.dtype
        if config.compute_dtype is not None and param.dtype in (torch.float32, *_HALF):
            read_dtype = config.compute_dtype
        persistent = config.stage < 3 or param.numel() <= config.zero_optimization.param_persistence_threshold
        found.append(
            ShardedParam(
                len(found),
                name,
                param.shape,
                param.dtype,
                read_dtype,
                param,
                tuple(where),
                persistent,
                param in leaves,
            )
        )
    return found


def _leaf_parameters(model: nn.Module, wanted: list[str]) -> set[nn.Parameter]:
    matched: dict[str, bool] = dict.fromkeys(wanted, False)
    params: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name in {path, type(module).__name__} & set(wanted):
            matched[name] = True
            params.update(module.parameters())
    missing = [name for name, hit in matched.items() if not hit]
    if missing:
        raise ValueError(
            f"config key 'zero_optimization.leaf_modules' names {missing[0]!r}, which is neither the class nor the path of "
            f"a module in {type(model).__name__}"
        )
    return params


def _check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' is lazy and has no shape yet: run the model once before it is sharded")
    if param.device.type not in ("cpu", "cuda", "meta") or param.layout != torch.strided:
        raise ValueError(
            f"parameter '{name}' is on device '{param.device}' in layout {param.layout}; strided parameters on cpu and cuda "
            "can be sharded"
        )
    if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
        raise ValueError(f"parameter '{name}' is a {type(param.data).__name__}; shard a model of plain tensors")
    if not (param.is_floating_point() or param.is_complex()) and param.requires_grad:
        raise ValueError(f"parameter '{name}' of dtype {param.dtype} requires a gradient")


_NO_HOOKS = (
    "hooks on sharded parameters would see no gradient, since autograd hands it to the reduction over the ranks. After "
    "loss.backward(), param.grad is the averaged gradient of this rank's part: change it there, before optimizer.step()"
)


class _RefuseHooks:
    """Stands where a sharded parameter has ``register_hook``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, hook: Any) -> NoReturn:
        raise RuntimeError(f"a hook on parameter '{self._name}': {_NO_HOOKS}")


def _check_hooks(found: list[ShardedParam]) -> None:
    for sharded in found:
        if sharded.param._backward_hooks or sharded.param._post_accumulate_grad_hooks:
            raise ValueError(f"parameter '{sharded.name}' has a hook: {_NO_HOOKS}")


def _refuse_hooks(sharded: ShardedParam) -> None:
    sharded.param.register_hook = _RefuseHooks(sharded.name)  # type: ignore[method-assign]
    sharded.param.register_post_accumulate_grad_hook = _RefuseHooks(sharded.name)  # type: ignore[method-assign]


def _put_shard(sharded: ShardedParam, own: torch.Tensor, sharding: Sharding) -> ShardedParam:
    """A parameter without data becomes one with this rank's part."""
    own = _kept(sharded, own, sharding)
    param = nn.Parameter(own, requires_grad=sharded.param.requires_grad)
    param.full_shape = sharded.full_shape  # type: ignore[attr-defined]
    for module, attribute in sharded.places:
        module._parameters[attribute] = param
    if not sharding.whole:
        make_shard(param, sharded.name, sharded.full_shape)
    return dataclasses.replace(sharded, param=param)


def _kept(sharded: ShardedParam, own: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """What the parameter holds: its part in memory from which gathers are fastest, as the fp32 master copy where reads cast.
    One rank that has everything keeps the parameter as it is.
    """
    dtype = torch.float32 if sharded.read_dtype == sharding.config.compute_dtype else own.dtype
    if sharding.whole:
        return own.to(sharding.runtime.device, dtype).view(sharded.full_shape)
    return sharding.runtime.empty(own.shape, dtype).copy_(own)


def _forget_its_graph(param: nn.Parameter) -> None:
    """While a graph from before sharding lives (a kept loss), autograd keeps the shape that the parameter's gradient had.
    It lets go of it where the dtype changes.
    """
    if param.requires_grad:
        other = torch.float64 if param.dtype != torch.float64 else torch.float32
        param.data = torch.empty(0, dtype=other, device=param.device)


def _replace_by_shard(sharded: ShardedParam, sharding: Sharding) -> None:
    """Rank 0 sends each rank its part."""
    param = sharded.param
    whole = param.detach()
    if sharding.whole:
        param.data = _kept(sharded, whole.contiguous(), sharding)
        param.grad = None
        param.full_shape = sharded.full_shape  # type: ignore[attr-defined]
        return
    own = sharding.transfers.scatter(whole, 0, f"parameter '{sharded.name}'")
    _forget_its_graph(param)
    param.data = _kept(sharded, own, sharding)
    param.grad = None
    make_shard(param, sharded.name, sharded.full_shape)


__all__ = [
    "ShardedParam",
    "Sharding",
    "is_sharded",
    "open_shardings",
    "shard",
    "sharding_of",
    "update_trainable",
]
