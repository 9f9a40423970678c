"""`SchedulerProcess`: the state that the hooks of one scheduler process share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.scheduler.cache_namespace import PrefixCache

__all__ = ["SchedulerProcess", "StagingCounts"]


@dataclass
class StagingCounts:
    """How many rows of this process were staged.

    Attributes:
        rows_staged: rows whose sets went through a staging area.
        rows_taken_again: staged rows that did not fit, whose sets were taken again.
    """

    rows_staged: int = 0
    rows_taken_again: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts as `GET /server_info` shows them."""
        return asdict(self)


@dataclass(frozen=True)
class SchedulerProcess:
    """The state of one scheduler process.

    Attributes:
        in_flight: counts the candidates that the process holds.
        prefix_cache: which weights the cached KV is of.
        staging: how many rows were staged.
    """

    in_flight: InFlight
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    staging: StagingCounts = field(default_factory=StagingCounts)
