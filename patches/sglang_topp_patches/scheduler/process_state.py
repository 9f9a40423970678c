"""The state that the hooks of one scheduler process share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.scheduler.cache_namespace import PrefixCache

__all__ = ["SchedulerProcess", "StagingCounts"]


@dataclass
class StagingCounts:
    """Counts the rows whose sets this process has written to a staging area (`scheduler.staging`).

    Attributes:
        rows_staged: rows whose sets went through a staging area.
        rows_taken_again: staged rows whose sets did not fit, and were taken again without staging.
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
        prefix_cache: tracks the weights that computed the cached KV.
        staging: counts the staged rows.
    """

    in_flight: InFlight
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    staging: StagingCounts = field(default_factory=StagingCounts)
