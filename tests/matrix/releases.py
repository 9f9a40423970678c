"""What `make matrix` runs: every SGLang release, on which Python, with which tests.

When a release comes out, this is where it is added; CONTRIBUTING.md says what else there is to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["FOLDER", "RELEASES", "SHORT_SET", "WHOLE_SET", "Release", "chosen"]

FOLDER = Path(__file__).parents[2] / "releases"
"""Each release's packages, pinned, and what came out: `0.5.20.lock`, `0.5.20.json`."""

WHOLE_SET = ("tests/engine", "tests/patches")
SHORT_SET = (
    "tests/engine/test_oracles.py::test_sets_equal_the_definition_on_transformers_logprobs",
    "tests/engine/test_requests.py",
    "tests/engine/test_concurrency.py",
    "tests/engine/test_retraction.py",
    "tests/engine/test_sampler_source.py",
    "tests/engine/test_fail_closed.py::test_doctor_holds_here",
    "tests/engine/test_pipeline_parallel.py",
    "tests/engine/test_disaggregation.py",
)
"""A start, the oracle that shares no code, streams, n above 1, prompt sets, aborts, retractions, what the
sampler could draw, doctor; and what no other release vouches for, where it is not refused: pipeline stages,
disaggregated servers."""


@dataclass(frozen=True)
class Release:
    """How one release of SGLang is installed and tested.

    Attributes:
        version: SGLang's.
        python: the Python that it runs on here, major and minor.
        whole: whether all of the engine's tests run, or the short set.
        constraints: what its own requirements leave open and should not, in the form that uv takes.
        overrides: what stands in place of its own requirements, in the same form.
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

    @property
    def result(self) -> Path:
        return FOLDER / f"{self.version}.json"


# It takes any `kernels`, and transformers of its time does not import with the newest.
_KERNELS = ("kernels<0.13",)
# It pins a pre-release that cannot be built from its package.
_CUDA_TILE = ("cuda-tile==1.6.0",)
# What outlines asks for has no wheel for Python 3.13; nothing but `--grammar-backend outlines` imports it.
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
"""SGLang version to release, the newest first."""


def chosen(versions: list[str]) -> list[Release]:
    """The releases of these versions, or all of them.

    Raises:
        ValueError: one is not in the table.
    """
    if unknown := [version for version in versions if version not in RELEASES]:
        raise ValueError(f"got the releases {', '.join(unknown)}, expected some of {', '.join(RELEASES)}")
    return [RELEASES[version] for version in versions] or list(RELEASES.values())
