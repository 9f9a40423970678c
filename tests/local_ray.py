"""Start Ray on this machine alone, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

__all__ = ["run_local_ray"]


@contextmanager
def run_local_ray(*, num_cpus: int = 1, object_store_bytes: int = 100 * 2**20) -> Iterator[None]:
    """Run Ray on loopback, without its dashboard and its usage report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            yield
        finally:
            ray.shutdown()
