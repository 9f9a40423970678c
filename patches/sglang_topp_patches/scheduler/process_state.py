"""The state that the hooks of one scheduler process share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.scheduler.prefix_cache_per_weights import PrefixCache

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


@dataclass(frozen=True)
class SchedulerProcess:
    """The state of one scheduler process.

    Attributes:
        in_flight: counts the candidates that the process holds.
        prefix_cache: tracks which weights computed the KV in the scheduler's prefix cache.
        staging: counts the rows whose sets were written to a staging area (`scheduler.gpu_staging`).
    """

    in_flight: InFlight
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    staging: StagingCounts = field(default_factory=StagingCounts)
