"""All ranks mean the same: proved over the group's store, with a deadline that names who is missing."""

from __future__ import annotations

import datetime
import time
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

#: How long one wait on the store may take before the deadline is looked at again, in seconds.
_SLICE = 1.0


class Agreement:
    """One line of agreements of a group: the n-th call on each rank belongs to the n-th call on the others."""

    def __init__(self, group: dist.ProcessGroup, name: str, timeout: float) -> None:
        self._store = PrefixStore(f"deepcompile/agreement/{group.group_name}/{name}", group.get_group_store())
        self._rank, self._world = group.rank(), group.size()
        self._timeout = timeout
        self._count = 0

    def exchange(self, text: str, what: str) -> list[str]:
        """What each rank said, by rank. An error that names the ranks that did not come in time."""
        number = self._count
        self._count += 1
        self._store.set(f"{number}/{self._rank}", text)
        factor = 10 if number == 0 else 1  # the first time ranks compile at different speed
        deadline = time.monotonic() + self._timeout * factor
        missing = [f"{number}/{rank}" for rank in range(self._world)]
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = ", ".join(key.split("/")[1] for key in missing)
                raise RuntimeError(
                    f"rank {self._rank} {what}, and rank {ranks} did not within {self._timeout * factor:g} seconds. Ranks "
                    "must run the same model code at the same step: does their data take different branches? A module "
                    "inside which they may is named in config key 'zero_optimization.leaf_modules'"
                )
            try:
                self._store.wait(missing, datetime.timedelta(seconds=min(left, _SLICE)))
                missing = []
            except RuntimeError as error:  # of which kind depends on the store
                if "timeout" not in str(error).lower():
                    raise
                missing = [key for key in missing if not self._store.check([key])]
        said = [self._store.get(f"{number}/{rank}").decode() for rank in range(self._world)]
        if number > 0:
            self._store.delete_key(f"{number - 1}/{self._rank}")  # everybody has read it: they are here
        return said

    def said_alone(self) -> dict[int, str]:
        """What other ranks said at the next agreement, to which this rank has not come."""
        others = {rank: f"{self._count}/{rank}" for rank in range(self._world) if rank != self._rank}
        return {rank: self._store.get(key).decode() for rank, key in others.items() if self._store.check([key])}

    def require_same(self, text: str, what: str) -> None:
        said = self.exchange(text, what)
        for rank, other in enumerate(said):
            if other != text:
                self.refuse(text, other, rank, what)

    def refuse(self, own: str, other: str, rank: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self._rank} and rank {rank} differ: each {what}, but rank {self._rank} means {own!r} and rank {rank} "
            f"{other!r}. Do all ranks run the same model code with the same configuration?"
        )


__all__ = ["Agreement"]
