"""Wraps functions of PyTorch that look at all gradients of a model, so that they give the global result for shards.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``torch.amp.GradScaler`` would each see this rank's part only.
Once a model is sharded they combine all ranks; on other tensors they are unchanged. Optimizers that are not elementwise,
and DistributedDataParallel, which would average a second time, are refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as clip_grad
from torch.optim import optimizer as torch_optimizer

from deepcompile.runtime.load import _C
from deepcompile.sharding import optimizer_states, shard_aware_saving
from deepcompile.sharding.shard_parameter import ShardParameter
from deepcompile.sharding.sharding import Sharding, open_shardings

#: Optimizers that compute norms or factors over a whole parameter, or a line search; by name, from whatever library.
_NOT_ELEMENTWISE = ("Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo", "SparseAdam")

#: The ids of an optimizer's parameters when :func:`before_update` last checked it.
_checked_params: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()

_installed = False


def install() -> None:
    """Called after each ``shard``. Installs the wrappers once."""
    global _installed
    _checked_params.clear()  # an optimizer that was checked before may hold parameters of the new sharding
    if _installed:
        return
    _installed = True
    _wrap_total_norm()
    _wrap_grad_scaler()
    _wrap_optimizer_states()
    _refuse_ddp()
    _allow_foreach()
    shard_aware_saving.install()
    torch_optimizer.register_optimizer_step_pre_hook(before_update)
    torch_optimizer.register_optimizer_step_post_hook(after_update)


def total_norm_over_shards(
    gradients: list[torch.Tensor], norm_type: float, sharding: Sharding, replicated: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm over the shards of all ranks. ``replicated``: the norm of gradients that are the same on every rank."""
    device, group = sharding.runtime.device, sharding.group
    if norm_type == 2.0:
        squares = _C.sum_of_squares(gradients, device)
        _sum_over_ranks(squares, group)
        return (squares if replicated is None else squares + replicated.double().square()).sqrt()
    local = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        local = torch.linalg.vector_norm(_local_norms(gradients, norm_type), norm_type, dtype=torch.float64)
    if norm_type == float("inf"):
        dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
        return local if replicated is None else torch.maximum(local, replicated.double())
    power = local**norm_type
    _sum_over_ranks(power, group)
    if replicated is not None:
        power = power + replicated.double() ** norm_type
    return power ** (1 / norm_type)


def _local_norms(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of each gradient, in at least 32 bits."""
    wide = any(gradient.dtype in (torch.float64, torch.complex128) for gradient in gradients)
    if any(gradient.is_complex() for gradient in gradients):
        return torch.stack([torch.linalg.vector_norm(gradient, norm_type).double() for gradient in gradients])
    return torch.stack(list(torch._foreach_norm(gradients, norm_type, torch.float64 if wide else torch.float32)))


def _sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums over the runtime's own channel if there is one for this device, so that the host does not block."""
    if group.size() == 1:
        return
    for sharding in open_shardings():
        if sharding.group is group and sharding.runtime.device == value.device:
            sharding.runtime.sum_over_ranks(value)
            return
    dist.all_reduce(value, group=group)


def _wrap_total_norm() -> None:
    # PyTorch's own is decorated with no_grad: a closure over the inner function, which is replaced in the closure's cell.
    public = clip_grad._get_total_norm
    cell = next((c for c in public.__closure__ or () if callable(c.cell_contents)), None)
    inner: Callable[..., torch.Tensor] = public if cell is None else cell.cell_contents

    @functools.wraps(inner)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        all_tensors = rest = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parts: list[tuple[Sharding, list[torch.Tensor]]] = []
        for sharding in open_shardings():
            addresses = {s.param.grad.data_ptr() for s in sharding.params if s.param.grad is not None}
            sharded = [tensor for tensor in rest if tensor.data_ptr() in addresses]
            if sharded:
                parts.append((sharding, sharded))
                rest = [tensor for tensor in rest if tensor.data_ptr() not in addresses]
        if not parts:
            return inner(all_tensors, norm_type, error_if_nonfinite, foreach)
        total = inner(rest, norm_type, False, foreach) if rest else None
        with torch.no_grad():
            for sharding, sharded in parts:
                total = total_norm_over_shards(sharded, float(norm_type), sharding, total)
        assert total is not None
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the total norm of order {norm_type} over the gradients of all ranks is {total.item()}; set "
                "error_if_nonfinite=False to clip by it anyway"
            )
        return total.to(parts[0][1][0].dtype.to_real())

    if cell is not None:
        cell.cell_contents = get_total_norm  # reaches programs that imported the function before
    else:
        clip_grad._get_total_norm = get_total_norm  # clip_grad_norm_ looks it up here
        vars(torch.nn.utils)["get_total_norm"] = get_total_norm


def _wrap_grad_scaler() -> None:
    inner = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(inner)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = inner(self, optimizer, *args, **kwargs)
        for sharding in open_shardings():
            members = sharding.by_parameter()
            if any(param in members for group in optimizer.param_groups for param in group["params"]):
                device = sharding.runtime.device
                total = found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
                for other in found.values():
                    total.copy_(torch.maximum(total, other.to(device)))
                dist.all_reduce(total, dist.ReduceOp.MAX, group=sharding.group)  # all ranks skip, or none
        return found

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def _allow_foreach() -> None:
    """Lets optimizers use foreach kernels for shards: they do so only for listed parameter classes."""
    if ShardParameter not in torch_optimizer._foreach_supported_types:
        torch_optimizer._foreach_supported_types.append(ShardParameter)


def _wrap_optimizer_states() -> None:
    kind: Any = torch.optim.Optimizer
    save, load = kind.state_dict, kind.load_state_dict

    @functools.wraps(save)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        optimizer_states.slice_whole_states(self, open_shardings())
        return optimizer_states.with_parts(self, save(self, *args, **kwargs), open_shardings())

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        load(self, optimizer_states.with_own(self, state_dict, open_shardings()), *args, **kwargs)

    kind.state_dict, kind.load_state_dict = state_dict, load_state_dict


def _refuse_ddp() -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    inner = ddp.__init__

    @functools.wraps(inner)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        sharded = next((name for name, param in module.named_parameters() if hasattr(param, "full_shape")), None)
        if sharded is not None:
            raise RuntimeError(
                f"DistributedDataParallel: parameter '{sharded}' is sharded by deepcompile, which averages gradients over "
                "the ranks already; use the model as it is"
            )
        inner(self, module, *args, **kwargs)

    ddp.__init__ = init  # type: ignore[method-assign]


def refuse_whole_parameter_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in _NOT_ELEMENTWISE), None)
    if kind is not None:
        module = "torch.optim" if type(optimizer).__module__.startswith("torch.") else type(optimizer).__module__
        raise RuntimeError(
            f"{module}.{kind} treats a parameter as a whole, and this rank holds only a part of each: use an optimizer "
            "that works element by element (SGD, Adam, AdamW, RMSprop, Adagrad, ...)"
        )


def before_update(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """A hook before every ``optimizer.step()``."""
    _refuse_whole_parameter_optimizers(optimizer)
    params = [id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if _checked_params.get(optimizer) != params:
        _refuse_added_parameters(optimizer)
        optimizer_states.slice_whole_states(optimizer, open_shardings())
        _checked_params[optimizer] = params


def are_the_only_hooks() -> bool:
    """True if no other library has registered global hooks on optimizer steps."""
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [list(found.values()) for found in hooks] == [[before_update], [after_update]]


def _refuse_added_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuses parameters that were added to a model after sharding: no reduction averages their gradients over the ranks."""
    others = {
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if not hasattr(param, "full_shape") and param.requires_grad and param.numel() > 0
    }
    for sharding in open_shardings() if others else ():
        model = sharding.model_or_none
        for name, param in model.named_parameters() if model is not None and not sharding.single_rank else ():
            if param in others:
                raise RuntimeError(
                    f"parameter '{name}' was added to {type(model).__name__} after it was sharded, and each rank would "
                    "train its own: add modules and parameters before deepcompile.shard or initialize"
                )


def _refuse_whole_parameter_optimizers(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer).__name__ in _NOT_ELEMENTWISE:
        members = {param for sharding in open_shardings() for param in sharding.by_parameter()}
        if any(param in members for group in optimizer.param_groups for param in group["params"]):
            refuse_whole_parameter_optimizer(optimizer)


def after_update(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """A hook after every ``optimizer.step()``. Gathered copies become stale when the shard's version changes; fused
    optimizers, and those that write to ``param.data``, do not change it.
    """
    note_update([param for group in optimizer.param_groups for param in group["params"] if param.grad is not None])


def note_update(params: list[torch.nn.Parameter]) -> None:
    """Increments the versions of those ``params`` that are shards: they were updated."""
    updated = [param for param in params if hasattr(param, "full_shape")]
    if updated:
        torch.autograd.graph.increment_version(updated)
