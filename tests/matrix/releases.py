"""The SGLang releases that `make matrix` tests, each with its Python version and its set of tests.

Add a new release here. CONTRIBUTING.md lists the other steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["FOLDER", "RELEASES", "SHORT_SET", "WHOLE_SET", "Release", "select_releases"]

FOLDER = Path(__file__).parents[2] / "releases"
"""Pinned packages and results of each release, such as `0.5.20.lock` and `0.5.20.json`."""

WHOLE_SET = ("tests/engine", "tests/patches")
SHORT_SET = (
    "tests/engine/test_sets_against_references.py::test_sets_equal_the_definition_on_transformers_logprobs",
    "tests/engine/test_request_kinds.py",
    "tests/engine/test_load_orders.py",
    "tests/engine/test_server_defaults.py",
    "tests/engine/test_concurrency.py",
    "tests/engine/test_retraction.py",
    "tests/engine/test_scores_after_pushes.py",
    "tests/engine/test_sampler_source.py",
    "tests/engine/test_fail_closed.py::test_doctor_holds_here",
    "tests/engine/test_cpu_platform.py",
    "tests/engine/test_pipeline_parallel.py",
    "tests/engine/test_disaggregation.py",
    "tests/engine/test_speculative.py",
    "tests/engine/test_speculative_interruptions.py",
)
"""Covers the start of a server, the independent oracle, streams, n above 1, prompt sets, aborts, retractions,
scores after weight pushes, the sampler as source, doctor, and machines without an accelerator. Also pipeline
parallelism, disaggregated servers, and speculation, because their support differs between releases."""


@dataclass(frozen=True)
class Release:
    """How one release of SGLang is installed and tested.

    Attributes:
        version: The SGLang version.
        python: The Python version to test with, major and minor.
        whole: Run all engine tests instead of the short set.
        constraints: Bounds for packages that the release leaves unbounded, as requirements.
        overrides: Requirements that replace those of the release's packages.
    """

    version: str
    python: str = "3.11"
    whole: bool = False
    constraints: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, ...]:
        return WHOLE_SET if self.whole else SHORT_SET

    @property
    def lock(self) -> Path:
        return FOLDER / f"{self.version}.lock"


# The release leaves `kernels` unbounded, but its transformers version fails to import the newest one.
_KERNELS = ("kernels<0.13",)
# The release pins a pre-release whose source package cannot be built.
_CUDA_TILE = ("cuda-tile==1.6.0",)
# The pinned outlines-core has no wheel for Python 3.13. Only `--grammar-backend outlines` imports it.
_OUTLINES_CORE = ("outlines-core==0.2.14",)

RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        release.version: release
        for release in (
            Release("0.5.23", whole=True),
            Release("0.5.22", overrides=_CUDA_TILE),
            Release("0.5.21", overrides=_CUDA_TILE),
            Release("0.5.20", whole=True, overrides=_CUDA_TILE),
            Release("0.5.19", overrides=_CUDA_TILE),
            Release("0.5.18", overrides=_CUDA_TILE),
            Release("0.5.17"),
            Release("0.5.16"),
            Release("0.5.15.post1", whole=True),
            Release("0.5.15"),
            Release("0.5.14"),
            Release("0.5.13.post1"),
            Release("0.5.13"),
            Release("0.5.12.post1", python="3.13", constraints=_KERNELS, overrides=_OUTLINES_CORE),
            Release("0.5.12", whole=True, python="3.12", constraints=_KERNELS),
        )
    }
)
"""Releases by SGLang version, newest first."""


def select_releases(versions: list[str]) -> list[Release]:
    """Return the releases of these versions, or all of them if the list is empty.

    Raises:
        ValueError: A version is not in `RELEASES`.
    """
    if unknown := [version for version in versions if version not in RELEASES]:
        raise ValueError(f"got the releases {', '.join(unknown)}, expected some of {', '.join(RELEASES)}")
    return [RELEASES[version] for version in versions] or list(RELEASES.values())
