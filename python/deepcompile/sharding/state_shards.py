"""A tensor subclass for one rank's part of a parameter or state, with its origin. ``state_dict()`` of a sharded model and of
its optimizer contains them.

They compute like any tensor, and results of their size (a copy, an average) keep the origin. They cannot be pickled, because
a file with one rank's parts would look like a model without being one. ``load_state_dict`` accepts a flat tensor only if its
origin says that it is this rank's own part.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

#: What to call instead, at the end of an error.
ADVICE = (
    "Save whole parameters, deepcompile.full_state_dict(model), and whole states, "
    "deepcompile.full_optimizer_state_dict(model, optimizer), which every rank calls, with torch.save on one rank; or use "
    "engine.save_16bit_model(folder) or engine.save_checkpoint(folder)"
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a tensor is a part of."""

    #: "parameter 'x'", or "state 'exp_avg' of parameter 'x'".
    what: str
    full_shape: torch.Size
    rank: int
    world: int

    def words(self) -> str:
        return (
            f"{self.what} of shape {list(self.full_shape)} is sharded by deepcompile: this tensor is only the part of rank "
            f"{self.rank} of {self.world}"
        )

    def refuse(self) -> NoReturn:
        raise RuntimeError(f"{self.words()}, and cannot be pickled or written to a file. {ADVICE}")

    def same_part(self, other: Origin) -> bool:
        """Whether both are the same elements of wholes of the same shape (possibly of different models)."""
        return (self.full_shape, self.rank, self.world) == (other.full_shape, other.rank, other.world)


class StateShard(torch.Tensor):
    """Made by :func:`as_state_shard`."""

    origin: Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        origin = next(value.origin for value in tensors if isinstance(value, StateShard))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if type(error) not in (IndexError, RuntimeError):
                raise
            # Most likely the program used the part as if it were the whole parameter.
            raise type(error)(f"{error}. {origin.words()}, and flat. {ADVICE}") from error

        def marked(value: torch.Tensor) -> torch.Tensor:
            # Leaves out arguments that were written in place, and scalars such as a norm.
            is_new = type(value) is torch.Tensor and not any(value is one for one in tensors)
            return _mark(value, origin) if is_new and value.dim() > 0 else value

        return tree_map_only(torch.Tensor, marked, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        copied: StateShard = memo[id(self)]
        return copied

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.origin.refuse()


def _mark(tensor: torch.Tensor, origin: Origin) -> StateShard:
    found = tensor.as_subclass(StateShard)
    found.origin = origin
    return found


def as_state_shard(tensor: torch.Tensor, origin: Origin) -> StateShard:
    """The tensor's values in its own memory, without its graph."""
    return _mark(as_plain(tensor), origin)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the same memory, as a plain tensor without a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def origin_of(value: Any) -> Origin | None:
    """The origin of a state shard, a sharded parameter or its ``data``. None for whole tensors and other values."""
    origin = getattr(value, "origin", None) if isinstance(value, torch.Tensor) else None
    return origin if isinstance(origin, Origin) else None
