"""The class of the parameters in ``model.parameters()`` of a sharded model. It behaves like ``nn.Parameter``, and raises an
error where that would silently give a wrong result.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from deepcompile.runtime.load import _C
from deepcompile.sharding.state_shards import Origin, as_plain


class ShardParameter(nn.Parameter):
    """Holds this rank's part of a parameter. Writing to ``param.data`` increments the parameter's version; assigning other
    memory to ``param.data`` is an error.
    """

    full_shape: torch.Size
    shard_name: str
    #: What this shard is a part of; None if this rank holds the whole parameter.
    origin: Origin | None = None
    #: True for a deepcopy, which the runtime does not know and does not gather from.
    is_copy = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.origin is not None:
            self.origin.refuse()
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.origin, copied.full_shape, copied.shard_name = self.origin, self.full_shape, self.shard_name
        copied.is_copy = True
        return copied

    @property
    def data(self) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.detach()  # shares the parameter's version, so writes count without ShardData
        plain: torch.Tensor = _get_data(self)
        if _asked_by_pytorch():
            return plain
        data = plain.as_subclass(ShardData)
        data.parameter = self
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not self.is_copy and (value.data_ptr(), value.dtype, value.shape) != (
            self.data_ptr(),
            self.dtype,
            self.shape,
        ):
            raise RuntimeError(
                f"'{self.shard_name}'.data = ...: the runtime gathers from the memory of this rank's part, and no other can "
                "be put in its place. Write into it: `with torch.no_grad(): param.copy_(value)` takes this rank's part, "
                "`with deepcompile.full_params(model):` gives whole parameters to write to"
            )
        _set_data(self, value)


_get_data, _set_data = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _asked_by_pytorch() -> bool:
    """True if code of PyTorch reads ``param.data``. It checks the class, so it gets a plain tensor, and does not write to
    shards through it.
    """
    return str(sys._getframe(2).f_globals.get("__name__", "")).split(".")[0] == "torch"


class ShardData(torch.Tensor):
    """``param.data`` of a sharded parameter, and its views. A plain ``data`` tensor has its own version counter, so the
    runtime would miss writes to it; this class increments the parameter's version at each write.
    """

    parameter: ShardParameter

    @property
    def origin(self) -> Origin | None:
        return self.parameter.origin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.origin is not None:
            self.origin.refuse()
        return as_plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = [value for value in _tensors((args, kwargs)) if isinstance(value, ShardData)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None:
            torch.autograd.graph.increment_version([value.parameter for value in parts])
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: _marked(value, parts), result)


#: Besides functions whose names end with an underscore.
_WRITES = (
    "__setitem__",
    "__set__",
    *(
        f"__i{name}__"
        for name in (
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "mod",
            "pow",
            "and",
            "or",
            "xor",
            "lshift",
            "rshift",
            "matmul",
        )
    ),
)


def _marked(value: torch.Tensor, sources: list[ShardData]) -> torch.Tensor:
    """``value`` as ShardData if it is a view of one of ``sources``, so that writes to it count, too."""
    memory = value.untyped_storage().data_ptr()
    source = next((one for one in sources if one.untyped_storage().data_ptr() == memory), None)
    if source is None or memory == 0:
        return value
    view = value if isinstance(value, ShardData) else value.as_subclass(ShardData)
    view.parameter = source.parameter
    return view


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def make_shard(param: nn.Parameter, name: str, full_shape: torch.Size) -> None:
    """Makes ``param``, which holds this rank's part, a :class:`ShardParameter`, in place."""
    param.__class__ = ShardParameter
    assert isinstance(param, ShardParameter)
    param.shard_name, param.full_shape = name, full_shape


def refuse_direct_gradient(param: nn.Parameter, name: str, place: str) -> None:
    """Makes the backward of a loss that was computed from the shard itself an error. Called once for each parameter that
    is trained.
    """
    path, _, attribute = name.rpartition(".")
    module = f"model.{path}" if path else "model"
    _C.Runtime.refuse_direct_gradients(
        param,
        f"the loss was computed from parameter '{name}' as it is in model.parameters(), where {place} has only its part of "
        f"it. Read it from its module instead: {module}.{attribute} is the whole parameter, and its gradient the mean over "
        "the ranks. For a plain penalty on weights there is also the optimizer's weight_decay",
    )


_C.take_for_parameters(ShardParameter)  # lets direct calls of operators (direct_calls.py) accept this subclass
