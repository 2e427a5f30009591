"""The state of a sharded model: its parameters, its runtime and its configuration. Modules find it by ``sharding_of``."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from deepcompile.config.config import Config
from deepcompile.runtime import channels
from deepcompile.runtime.group_transfers import GroupTransfers, slice_of
from deepcompile.runtime.runtime import Runtime
from deepcompile.sharding import sharded_modules
from deepcompile.sharding.model_agreement import Identity
from deepcompile.sharding.shard_parameter import refuse_direct_gradient
from deepcompile.sharding.state_shards import Origin

if TYPE_CHECKING:
    from deepcompile.sharding.state_offload import StateOffload

HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A sharded parameter. ``param`` holds this rank's part, flat and padded to the same size on all ranks; on a single rank
    (:attr:`Sharding.single_rank`) the whole parameter in its own shape.
    """

    id: int
    name: str
    full_shape: torch.Size
    original_dtype: torch.dtype
    #: The dtype that gathers cast to, which modules see.
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


class CompiledCall(NamedTuple):
    """A run of one compiled graph."""

    step: Any  # a Step of the planner
    phase: str


class Sharding:
    """One sharded model: its runtime, its graph id and its parameters."""

    #: The class of :attr:`planner`. Set by :mod:`deepcompile.planning`, which may import this package but not vice versa.
    planner_type: ClassVar[Callable[[Sharding], Any]]

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
        #: Transfers between ranks outside of steps: sharding, saving, loading.
        self.transfers = transfers
        self.rank, self.world = group.rank(), group.size()
        #: The runtime's graph that has every parameter.
        self.graph_id = identity.graph_id
        self.serial = identity.serial
        self.runtime = Runtime(
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
        #: The only rank holds everything: modules read parameters directly, and autograd puts gradients on them.
        self.single_rank = self.world == 1 and not config.zero_optimization.gather_at_one_rank
        #: Whether gradient buffers are freed at each update and allocated in the backward: an engine's choice.
        self.frees_gradients = False
        #: Moves an optimizer's states to the host and back, if an engine does that; the planner takes it into account.
        self.offload: StateOffload | None = None
        self.params: list[ShardedParam] = []
        self.steps_begun = 0  # by the engine
        #: Runs of compiled graphs that train, while a profile or a recording collects them; else None.
        self.calls: list[CompiledCall] | None = None
        self._trained: list[bool] = []  # for each parameter, whether the runtime has a gradient buffer for it
        self._refusing: set[int] = set()  # ids for which refuse_direct_gradient was called
        self._model = weakref.ref(model)
        self._planner: Any = None

    @property
    def model_or_none(self) -> nn.Module | None:
        """None if the model was garbage collected. (Submodules of it may still be alive.)"""
        return self._model()

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the sharded model is gone")
        return model

    @property
    def planner(self) -> Any:
        """Made at its first use, which is a collective: when the model is compiled."""
        if self._planner is None:
            self._planner = type(self).planner_type(self)
        return self._planner

    @property
    def is_planned(self) -> bool:
        """Whether a planner was made, from the configuration as it was then."""
        return self._planner is not None

    @property
    def reads_in_place(self) -> bool:
        """True in the steps of an engine on one rank: a gather returns the parameter itself, so there is nothing to plan."""
        in_place = os.environ.get("DEEPCOMPILE_READ_IN_PLACE", "auto") != "off"
        return self.world == 1 and self.steps_begun > 0 and in_place and self.config.compile.mode == "compile"

    @property
    def collectives_stop_compute(self) -> bool:
        """True if collectives run on the caller's thread, so that compute stands still meanwhile."""
        return self.runtime.device.type == "cpu" and self.runtime.stats()["cpu_stream"] == "inline"

    @property
    def names(self) -> dict[int, str]:
        """The names of the parameters, by id."""
        return {sharded.id: sharded.name for sharded in self.params}

    def by_parameter(self) -> dict[nn.Parameter, ShardedParam]:
        return {sharded.param: sharded for sharded in self.params}

    def register(self) -> None:
        """Tells the runtime of all parameters, on which the ranks agree at the first gather, and gives the modules classes
        that read through it.
        """
        for sharded in self.params:
            self.runtime.register_z3_param(
                sharded.id,
                sharded.full_shape,
                sharded.flat if self.single_rank else sharded.param,  # the runtime sets .grad of this tensor
                self._gradient_buffer(sharded.param),
                sharded.persistent,
                name=sharded.name,
                reduce_dtype=self.config.reduce_dtype,
            )
        self._trained = [sharded.param.requires_grad for sharded in self.params]
        self._refuse_direct_gradients()
        ids = [sharded.id for sharded in self.params]
        self.runtime.register_graph_z3(self.graph_id, ids, reduce_at_update=self.config.stage == 1)
        sharded_modules.install(self)
        for module in self.model.modules():
            _shardings[module] = self

    def _refuse_direct_gradients(self) -> None:
        for sharded in self.params if not self.single_rank else ():
            if sharded.param.requires_grad and sharded.id not in self._refusing:
                self._refusing.add(sharded.id)
                refuse_direct_gradient(sharded.param, sharded.name, f"rank {self.rank} of {self.world}")

    def _gradient_buffer(self, param: nn.Parameter) -> torch.Tensor | None:
        """The buffer for the gradient of this rank's part; None for a frozen parameter."""
        if not param.requires_grad or self.single_rank:
            return None
        return torch.zeros_like(param, dtype=self.sum_dtype(param), requires_grad=False)

    def sum_dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype of the gradient buffer: fp32 for 16-bit parameters with accumulation, else the parameter's own."""
        several = (self.config.gradient_accumulation_steps or 1) > 1
        return torch.float32 if param.dtype in HALF and several else param.dtype

    def _changed_trainable(self) -> list[ShardedParam]:
        return [s for s, trained in zip(self.params, self._trained, strict=True) if s.param.requires_grad != trained]

    def changed_trainable(self) -> list[str]:
        """The names of parameters whose ``requires_grad`` changed since the runtime was last told."""
        return [sharded.name for sharded in self._changed_trainable()]

    def update_trainable(self) -> list[str]:
        """Tells the runtime which parameters are trained now: newly trained ones get a gradient buffer, newly frozen ones
        lose it. Returns the names of both. Every rank calls it, between steps; the ranks compare at the next forward.
        """
        changed = self._changed_trainable()
        for sharded in changed:
            param = sharded.param
            if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
                raise ValueError(f"parameter '{sharded.name}' of dtype {param.dtype} requires a gradient")
            if not self.single_rank:
                self.runtime.set_grad_buffer(
                    sharded.id, self._gradient_buffer(param), reduce_dtype=self.config.reduce_dtype
                )
            param.grad = None
            sharded_modules.force_guard_check(sharded)
        if not changed:
            return []
        self._trained = [sharded.param.requires_grad for sharded in self.params]
        self._refuse_direct_gradients()
        if self._planner is not None:
            self._planner.refresh_metadata()
        return [sharded.name for sharded in changed]

    def gather(self, sharded: ShardedParam, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor with the whole parameter, in ``dtype`` (default: the shard's own). Every rank calls it."""
        if self.single_rank:
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
        """The origin of this rank's part."""
        return Origin(f"parameter '{sharded.name}'", sharded.full_shape, self.rank, self.world)

    def end_backward(self) -> None:
        """Releases the parameters of leaf modules, which are kept until the backward ends."""
        for sharded in self.params:
            if sharded.leaf and not sharded.persistent:
                self.runtime.invalidate_gathered_param(sharded.id)

    @property
    def is_open(self) -> bool:
        return self.runtime.is_open

    def close(self) -> None:
        self.runtime.cleanup()


def _device_of(model: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """The device of the model's parameters; if they have no data, that of its buffers, else the group's default device."""
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
    """To be called after ``requires_grad_`` of sharded parameters in the plain loop (an engine notices it): tells the
    runtime which parameters are trained. Every rank calls it, between steps. Returns the names of those that changed.
    """
    return sharding_of(model).update_trainable()


def is_sharded(model: nn.Module) -> bool:
    return model in _shardings


def open_shardings() -> list[Sharding]:
    """All shardings that are not closed, in the same order on all ranks."""
    found = {sharding for sharding in _shardings.values() if sharding.runtime.is_open}
    return sorted(found, key=lambda sharding: sharding.graph_id)
