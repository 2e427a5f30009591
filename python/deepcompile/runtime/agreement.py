"""Exchanges short texts between all ranks over the group's store, to check that they agree. After the deadline an error
names the missing ranks.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

#: How long one wait on the store may take before the deadline is looked at again, in seconds.
_SLICE = 1.0
#: Begins the text of a rank that has failed.
_FAILED = "failed: "
_LONGEST_FAILURE = 4000

_SAME_CODE = (
    "Ranks must run the same model code at the same step: does their data take different branches? A module inside which "
    "they may is named in config key 'zero_optimization.leaf_modules'"
)


class PeerFailed(RuntimeError):
    """Another rank has failed, and this one has not."""


class Agreement:
    """A sequence of agreements of a group: the n-th call on each rank belongs to the n-th call on the others. ``timeout``:
    seconds, or a function that returns them at each agreement. ``advice`` is appended to the error for missing ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, timeout: float | Callable[[], float], advice: str = _SAME_CODE
    ) -> None:
        self._store = PrefixStore(f"deepcompile/agreement/{group.group_name}/{name}", group.get_group_store())
        self._rank, self._world = group.rank(), group.size()
        self._timeout = timeout
        self._advice = advice
        self._count = 0

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks, by rank. Raises an error that names the ranks that did not call in time or, at once, a
        rank that called :meth:`fail`. ``what``: what this rank did, for the error.
        """
        number = self._say(text)
        timeout = self._timeout() if callable(self._timeout) else self._timeout
        deadline = time.monotonic() + timeout
        missing = list(range(self._world))
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = ", ".join(map(str, missing))
                raise RuntimeError(
                    f"rank {self._rank} {what}, and rank {ranks} did not within {timeout:g} seconds. {self._advice}"
                )
            try:
                keys = [f"{number}/{rank}" for rank in missing]
                self._store.wait(keys, datetime.timedelta(seconds=min(left, _SLICE)))
                here = missing
            except RuntimeError as error:  # the class of a timeout depends on the store
                if "timeout" not in str(error).lower():
                    raise
                here = [rank for rank in missing if self._store.check([f"{number}/{rank}"])]
            for rank in here:
                self._raise_failure(rank, self._store.get(f"{number}/{rank}").decode(), what)
            missing = [rank for rank in missing if rank not in here]
        texts = [self._store.get(f"{number}/{rank}").decode() for rank in range(self._world)]
        if number > 0:
            self._store.delete_key(f"{number - 1}/{self._rank}")  # all ranks reached this round, so the old key is dead
        return texts

    def fail(self, error: BaseException | str) -> None:
        """Called instead of :meth:`exchange`: the other ranks raise :class:`PeerFailed` there. Does not wait for them."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._say(f"{_FAILED}{text[:_LONGEST_FAILURE]}")

    def _say(self, text: str) -> int:
        number = self._count
        self._count += 1
        self._store.set(f"{number}/{self._rank}", text)
        return number

    def _raise_failure(self, rank: int, text: str, what: str) -> None:
        if text.startswith(_FAILED):
            raise PeerFailed(f"rank {self._rank} {what}, and rank {rank} failed there: {text.removeprefix(_FAILED)}")

    def waiting_ranks(self) -> dict[int, str]:
        """The texts of ranks that have reached the next agreement, by rank; this rank has not."""
        others = {rank: f"{self._count}/{rank}" for rank in range(self._world) if rank != self._rank}
        return {rank: self._store.get(key).decode() for rank, key in others.items() if self._store.check([key])}

    def silent(self, seconds: float) -> list[int]:
        """The ranks that do not make this call within ``seconds``. Called after an operation has failed on all live ranks;
        the last call on this object.
        """
        self._store.set(f"gave up/{self._rank}", "")
        keys = [f"gave up/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(0.05)
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def require_same(self, text: str, what: str) -> None:
        texts = self.exchange(text, what)
        for rank, other in enumerate(texts):
            if other != text:
                self.refuse(text, other, rank, what)

    def refuse(self, own: str, other: str, rank: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self._rank} and rank {rank} differ: each {what}, but rank {self._rank} means {own!r} and rank {rank} "
            f"{other!r}. Do all ranks run the same model code with the same configuration?"
        )
