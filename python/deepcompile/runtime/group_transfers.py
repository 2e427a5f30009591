"""Transfers over the process group itself: scattering whole parameters, broadcasting buffers, gathering states. They have
the configured deadline, and go through host memory if the group does not support the device.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, ScatterOptions

from deepcompile.runtime.agreement import Agreement

#: Seconds within which one operation's deadline passes on all live ranks.
_DEADLINE_SPREAD = 2.0

_ADVICE = "Is every rank alive, and does each run the same program? Config key 'timeout' is what a wait may take"

#: How often transfers were opened on a group, by its name. The same on all ranks, because opening is a collective.
_opened: Counter[str] = Counter()


def slice_of(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's part of a whole tensor: flat, padded with zeros to the same size on all ranks."""
    size = -(-whole.numel() // world)
    part = whole.reshape(-1)[rank * size : (rank + 1) * size]
    if part.numel() == size:
        return part
    padded = torch.zeros(size, dtype=whole.dtype, device=whole.device)
    padded[: part.numel()] = part
    return padded


class GroupTransfers:
    """Every rank of ``group`` constructs it at the same point of the program and then makes the same calls."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        number = _opened[group.group_name]
        _opened[group.group_name] += 1
        self._group, self._rank, self._world = group, group.rank(), group.size()
        self._limit = datetime.timedelta(seconds=timeout)
        self._agreement = Agreement(group, f"transfers/{number}", timeout, _ADVICE)

    def meet(self, what: str) -> None:
        """A barrier. Raises if another rank called :meth:`fail`. ``what``: what this rank did, for the error."""
        if self._world > 1:
            self._agreement.exchange("", what)

    def fail(self, error: BaseException | str) -> None:
        """Called instead of :meth:`meet`, which then raises on the other ranks at once."""
        if self._world > 1:
            self._agreement.fail(error)

    def scatter(self, whole: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """This rank's part of rank ``source``'s tensor. ``whole`` has the same shape, dtype and device type on all ranks."""
        if self._world == 1:
            return slice_of(whole, 0, 1)
        own = torch.empty(-(-whole.numel() // self._world), dtype=whole.dtype, device=whole.device)
        parts = []
        if self._rank == source:
            parts = [self._sent(slice_of(whole, rank, self._world).contiguous()) for rank in range(self._world)]
        options = ScatterOptions()
        options.rootRank, options.timeout = source, self._limit
        received = self._sent(own)
        self._run(f"scattering {what}", lambda: self._group.scatter([received], [parts] if parts else [], options))
        return own.copy_(_as_before(received, own)) if received.device != own.device else own

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """In place, from rank ``source``."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = source, self._limit
        contiguous = tensor.detach().contiguous()
        sent = self._sent(contiguous)
        self._run(f"broadcasting {what}", lambda: self._group.broadcast([sent], options))
        if sent.device != tensor.device or contiguous.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(_as_before(sent, contiguous))

    def gather(self, own: torch.Tensor, what: str) -> torch.Tensor:
        """The concatenation of all ranks' flat tensors, which have the same shape, dtype and device type."""
        if self._world == 1:
            return own.clone()
        options = AllgatherOptions()
        options.timeout = self._limit
        contiguous = own.detach().contiguous()
        sent = self._sent(contiguous)
        received = [torch.empty_like(sent) for _ in range(self._world)]
        self._run(f"gathering {what}", lambda: self._group.allgather([received], [sent], options))
        return torch.cat([_as_before(part, contiguous) for part in received]).to(own.device)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes (which every backend can transfer, whatever the dtype) on a device that the group supports."""
        reached = any(device.type == tensor.device.type for device in self._group._device_types)
        return (tensor if reached else tensor.cpu()).reshape(-1).view(torch.uint8)

    def _run(self, what: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            silent = self._agreement.silent(_DEADLINE_SPREAD)
            answer = f"rank {', '.join(map(str, silent))} did not answer" if silent else "every rank waited for it"
            raise RuntimeError(
                f"{what} failed on rank {self._rank} of {self._world}, within {self._limit.total_seconds():g} seconds: "
                f"{answer}. {_ADVICE} ({error})"
            ) from error


def _as_before(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return sent.view(like.dtype).view(like.shape)
