"""The state that the hooks of one scheduler process share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakSet

from sglang_topp.malloc_trim import HeapTrimmer
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.scheduler.prefix_cache_per_weights import PrefixCache
from sglang_topp_patches.scheduler_messages import KEY, PROMPT_KEY

__all__ = ["SchedulerProcess", "StagingCounts"]


@dataclass
class StagingCounts:
    """Counters of the rows whose sets this process stages in GPU memory (`scheduler.gpu_staging`).

    A row is one token position of a forward pass.

    Attributes:
        rows_staged: number of rows with a set, including the rows whose set did not fit into a staging area.
        rows_taken_again: number of rows whose sets did not fit into a staging area, and were extracted again.
    """

    rows_staged: int = 0
    rows_taken_again: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return `rows_staged` and `rows_taken_again` as a dict.

        `GET /server_info` sums each counter over the schedulers that report their state.
        """
        return asdict(self)


@dataclass
class SchedulerProcess:
    """The state of one scheduler process.

    Attributes:
        requests: SGLang's `Req` objects that ask for sets. A request that SGLang drops leaves.
        trimmer: returns memory to the OS after a request has freed large sets.
        prefix_cache: tracks which weights computed the KV in the scheduler's prefix cache.
        staging: counts the rows whose sets were written to a staging area (`scheduler.gpu_staging`).
    """

    requests: WeakSet[Any] = field(default_factory=WeakSet)
    trimmer: HeapTrimmer = field(default_factory=HeapTrimmer)
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    staging: StagingCounts = field(default_factory=StagingCounts)

    _capabilities: Capabilities | None = None

    def capabilities_of(self, scheduler: Any) -> Capabilities:
        """Return what this process can serve, from the arguments of SGLang's `Scheduler`."""
        if self._capabilities is None:
            self._capabilities = Capabilities.of(scheduler.server_args)
        return self._capabilities

    @property
    def candidates_in_flight(self) -> int:
        """The number of candidates that this scheduler holds, because it has not sent them yet."""
        return sum(map(_num_unsent, self.requests))


def _num_unsent(req: Any) -> int:
    info = req.customized_info or {}
    packed = [row for row in info.get(PROMPT_KEY, ()) if isinstance(row, tuple)]
    for entry in reversed(info.get(KEY, ())):
        if entry is None:  # this one and all before it were sent
            break
        packed.append(entry.candidates or (b"", b""))
    return sum(len(ids) // 4 for ids, _ in packed)
