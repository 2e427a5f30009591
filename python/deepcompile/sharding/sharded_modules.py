"""Classes of modules whose parameters are sharded: subclasses of the original class, with properties that gather.

Equal modules (same class, names, shapes and dtypes) share one subclass, so that torch.compile, which guards on the class,
shares compiled code between equal layers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from deepcompile.sharding.state_shards import ADVICE, StateShard, as_plain, as_state_shard, origin_of

if TYPE_CHECKING:
    from deepcompile.sharding.sharding import ShardedParam, Sharding


@dataclasses.dataclass(frozen=True)
class _Read:
    """How one attribute is read; equal for equal layers."""

    attribute: str
    graph_id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    keep: bool
    #: The module holds the whole parameter; reading only casts it.
    single_rank: bool
    #: The sharding's serial number. A graph id may be reused after its engine was closed, but its compiled code must not be.
    serial: int


_classes: dict[tuple[type[nn.Module], tuple[_Read, ...]], type[nn.Module]] = {}


#: How writes to a gathered parameter are detected (src/ops/kernels.h). Outside of a forward, asking for writable memory is
#: an error at once. Some operators inside a module's forward ask for writable memory and only read; there only a change is
#: an error, raised a little later. Compiled code always asks, so it has no guard.
_NO_GUARD, _FORBID_WRITING, _NOTICE_WRITING = 0, 1, 2


def _guard() -> int:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL_OF_MODULES:
            return _NOTICE_WRITING
        frame = frame.f_back  # type: ignore[assignment]
    return _FORBID_WRITING


_CALL_OF_MODULES = nn.Module._call_impl.__code__


def _property(read: _Read) -> property:
    attribute, graph_id, shape = read.attribute, read.graph_id, list(read.shape)
    dtype, keep = read.dtype, read.keep

    def cast(module: nn.Module) -> torch.Tensor:
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter.to(dtype)

    if read.single_rank:
        return property(cast)

    def gather(module: nn.Module) -> torch.Tensor:
        shard = module._parameters[attribute]
        guard = _NO_GUARD if torch.compiler.is_compiling() else _guard()
        gathered: torch.Tensor = torch.ops.dc.gather_shard(shard, graph_id, shape, dtype, keep, guard)
        return gathered

    return property(gather)


def _some_getter(single_rank: bool = False) -> Callable[..., Any]:
    getter = _property(_Read("weight", 0, (), torch.float32, False, single_rank, 0)).fget
    assert getter is not None
    return getter


def _gathers_all(shards: list[Any], dtypes: list[torch.dtype], graph: int) -> Callable[..., None]:
    """What a leaf module does at its entry."""

    def gather_all(module: nn.Module, args: Any) -> None:
        torch.ops.dc.prefetch_shards(shards, graph, dtypes)

    return gather_all


#: The functions that run when eager code reads a parameter or enters a leaf module. (Closures made by one function share
#: their code object, so one example of each is enough.)
EAGER_FRAMES: tuple[Callable[..., Any], ...] = (_some_getter(), _guard, _gathers_all([], [], 0))

#: The code objects of all properties.
GETTERS = (_some_getter().__code__, _some_getter(single_rank=True).__code__)


def _no_copy(module: nn.Module, memo: Any) -> NoReturn:
    raise RuntimeError(
        f"a sharded {type(module).__name__} cannot be copied: copy the model before it is sharded, or load "
        "deepcompile.full_state_dict(model) into a fresh one"
    )


def _no_pickle(module: nn.Module, protocol: Any) -> NoReturn:
    raise RuntimeError(
        f"a sharded {type(module).__name__} cannot be pickled: save deepcompile.full_state_dict(model), or use "
        "engine.save_checkpoint"
    )


def _apply(module: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Overrides ``nn.Module._apply``, which ``to``, ``half``, ``cpu``, ... call. Refused unless ``fn`` leaves shards
    unchanged; then the parameter keeps its memory.
    """
    sharded = {
        name: param for name, param in module._parameters.items() if param is not None and hasattr(param, "full_shape")
    }
    for name, parameter in sharded.items():
        with torch.no_grad():
            result = fn(parameter)
        if not _is_same(result, parameter):
            raise RuntimeError(
                f"'{name}' of a sharded {type(module).__name__} cannot be moved or cast: call to(), half(), cuda(), ... "
                "before the model is sharded (config keys 'bf16' and 'fp16' choose the dtype to compute in)"
            )

    def leaves_shards(tensor: torch.Tensor) -> torch.Tensor:
        stays = any(tensor is param or tensor is param.grad for param in sharded.values())
        return tensor if stays else fn(tensor)

    original: type[Any] = module._deepcompile_original
    applied: nn.Module = original._apply(module, leaves_shards, recurse)
    return applied


def _is_same(result: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ``result`` has the parameter's dtype, shape, device and values. It may be a copy: ``to("cpu:0")`` copies what
    is on ``cpu``.
    """
    if any(getattr(result, name) != getattr(parameter, name) for name in ("dtype", "shape")):
        return False
    if result.data_ptr() == parameter.data_ptr() and not result.is_meta:
        return True
    one_device = result.device == parameter.device or result.device.type == parameter.device.type == "cpu"
    if not one_device or result.stride() != parameter.stride():
        return False
    bytes_of_both = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (result, parameter))
    return torch.equal(*bytes_of_both)


#: Inside ``unsharded.whole_state_dicts``: what state dicts contain for a parameter instead of this rank's part.
whole_of: Callable[[Any], torch.Tensor] | None = None


def _save_to_state_dict(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Puts this rank's parts into the state dict as :class:`StateShard`, or whole parameters if ``whole_of`` is set."""
    module._deepcompile_original._save_to_state_dict(module, destination, prefix, keep_vars)
    for attribute, parameter in module._parameters.items():
        key, origin = prefix + attribute, origin_of(parameter)
        if keep_vars or key not in destination or not hasattr(parameter, "full_shape"):
            continue
        if whole_of is not None:
            destination[key] = whole_of(parameter)
        elif origin is not None:
            destination[key] = as_state_shard(parameter, origin)


def _extra_repr(module: Any) -> str:
    """Lets one rank alone call ``print(model)``: the module's ``extra_repr`` sees meta tensors, so nothing is gathered."""
    shown = type(module)
    parameters = module._parameters
    module.__dict__["_parameters"] = {
        name: nn.Parameter(torch.empty(p.full_shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
        if p is not None and hasattr(p, "full_shape")
        else p
        for name, p in parameters.items()
    }
    module.__class__ = shown._deepcompile_original
    try:
        return str(module.extra_repr())
    finally:
        module.__class__ = shown
        module.__dict__["_parameters"] = parameters


def _flat_weights(module: Any) -> list[torch.Tensor]:
    """Recurrent modules read their parameters through this list; here it gathers them."""
    return [getattr(module, name) for name in module._flat_weights_names]


def _class_of(original: type[nn.Module], reads: tuple[_Read, ...]) -> type[nn.Module]:
    key = (original, reads)
    if key not in _classes:
        namespace: dict[str, Any] = {read.attribute: _property(read) for read in reads}
        namespace |= {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__deepcopy__": _no_copy,
            "__reduce_ex__": _no_pickle,
            "_apply": _apply,
            "_save_to_state_dict": _save_to_state_dict,
            "extra_repr": _extra_repr,
            "_deepcompile_original": original,
        }
        if issubclass(original, nn.RNNBase):
            namespace["_flat_weights"] = property(_flat_weights, lambda module, value: None)
        _classes[key] = type(original.__name__, (original,), namespace)
    return _classes[key]


def original_class(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "_deepcompile_original", type(module))


def install(sharding: Sharding) -> None:
    """Changes the classes of the model's modules, and adds hooks for ``load_state_dict`` and leaf modules."""
    reads: dict[nn.Module, list[tuple[ShardedParam, _Read]]] = {}
    for sharded in sharding.params:
        keep = (
            sharded.leaf or sharded.persistent
        )  # the copy stays after the read, so compiled code must not reuse its memory
        for module, attribute in sharded.places:
            read = _Read(
                attribute,
                sharding.graph_id,
                tuple(sharded.full_shape),
                sharded.read_dtype,
                keep,
                sharding.single_rank,
                sharding.serial,
            )
            reads.setdefault(module, []).append((sharded, read))
    for module, entries in reads.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # gradients are reduced dense
        module.register_load_state_dict_pre_hook(_Slicer(sharding, {read.attribute: s for s, read in entries}))  # type: ignore[no-untyped-call]
        # On a single rank, parameters that need no cast stay plain attributes.
        properties = [read for s, read in entries if not read.single_rank or read.dtype != s.param.dtype]
        if properties:
            module.__class__ = _class_of(type(module), tuple(properties))
    _install_leaf_hooks(sharding)


def force_guard_check(sharded: ShardedParam) -> None:
    """Makes Dynamo check its guards again after ``requires_grad_`` of a parameter. PyTorch 2.11 skips guards on modules
    whose dictionaries were not written to, and ``requires_grad_`` writes to none; so an entry is written and removed.
    """
    for module, _ in sharded.places:
        module._parameters["(written)"] = None
        del module._parameters["(written)"]


class _Slicer:
    """A pre-hook of ``load_state_dict``, which accepts whole parameters (this rank keeps its part) and this rank's own parts
    as ``state_dict()`` returned them. Other flat tensors are refused, since they may be another rank's part. With
    ``assign=True`` values are still copied, because the runtime identifies a shard by its memory.
    """

    def __init__(self, sharding: Sharding, params: dict[str, ShardedParam]) -> None:
        self._sharding = sharding
        self._params = params

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        metadata["assign_to_params_buffers"] = False
        self._sharding.runtime.end_reads()
        for attribute, sharded in self._params.items():
            key, value = prefix + attribute, state_dict.get(prefix + attribute)
            # (Inside full_params the module holds a whole parameter, which is loaded as usual.)
            if not isinstance(value, torch.Tensor) or module._parameters.get(attribute) is not sharded.param:
                continue
            own = self._own_part(sharded, value)
            if own is None:
                errors.append(self._refusal(key, sharded, value))
                own = sharded.param.detach()  # loads the current value, so that PyTorch adds no error of its own
            state_dict[key] = own.view(sharded.param.shape)

    def _own_part(self, sharded: ShardedParam, value: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of ``value``; None if ``value`` cannot be identified."""
        sharding = self._sharding
        if isinstance(value, StateShard):
            is_own = value.shape == sharded.param.shape and value.origin.same_part(sharding.origin(sharded))
            return as_plain(value) if is_own else None
        if value.shape == sharded.full_shape:
            return sharding.slice_of(sharded, value.detach())
        if sharding.world == 1 and value.shape == (sharded.numel,):  # flat, as with ``gather_at_one_rank``
            return value.detach()
        return None

    def _refusal(self, key: str, sharded: ShardedParam, value: torch.Tensor) -> str:
        sharding = self._sharding
        found = f"a tensor of shape {list(value.shape)}"
        if isinstance(value, StateShard):
            found += (
                f", which is a part that rank {value.origin.rank} of {value.origin.world} has of {value.origin.what}"
            )
        elif value.shape == sharded.param.shape:
            found += ", of which nothing says whether it is this rank's part"
        return (
            f"size mismatch for {key}: rank {sharding.rank} was given {found}. A sharded model takes whole parameters, here "
            f"of shape {list(sharded.full_shape)}, and the parts that state_dict() of such a model gave in this process. "
            f"{ADVICE}"
        )

    def __deepcopy__(self, memo: Any) -> _Slicer:
        return self


def _install_leaf_hooks(sharding: Sharding) -> None:
    """A leaf module gathers all its parameters at entry, in one collective, on every rank alike."""
    wanted = set(sharding.config.zero_optimization.leaf_modules)
    if not wanted or sharding.single_rank:
        return
    by_parameter = sharding.by_parameter()
    for path, module in sharding.model.named_modules():
        if not {path, original_class(module).__name__} & wanted:
            continue
        members = sorted({by_parameter[p].id for p in module.parameters() if p in by_parameter})
        shards = [sharding.params[index].param for index in members]
        dtypes = [sharding.params[index].read_dtype for index in members]

        module.register_forward_pre_hook(_gathers_all(shards, dtypes, sharding.graph_id))
