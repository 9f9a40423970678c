"""List the SGLang releases that are supported, and the features that each of them cannot serve.

A hook itself names the releases that it belongs to (`hooks`). No other module looks up SGLang's release
number. Candidate sets are refused on an unlisted release even if the signatures of all hooked functions
match, because a signature does not show how a release defines its log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from sglang_topp_patches.internals import (
    Internals,
    Sglang0512,
    Sglang0513,
    Sglang0514,
    Sglang0515,
    Sglang0516,
    Sglang0518,
    Sglang0519,
    Sglang0520,
    Sglang0521,
    Sglang0523,
)

__all__ = ["RELEASES", "UNLISTED", "Feature", "Release", "installed", "internals", "refused"]


class Feature(StrEnum):
    """A feature that some releases cannot serve.

    Each member's value is the name of the feature's server option, request field, or answer field.
    """

    SAMPLER_SOURCE = "top_logprobs_source"
    WEIGHT_VERSIONS = "weight_versions"
    PIPELINE = "--pp-size"
    DISAGGREGATION = "--disaggregation-mode"
    HTTP_WORKERS = "--tokenizer-worker-num"
    RESUMED = "resumed_tokens"
    SPECULATIVE = "--speculative-algorithm"
    REJECTION_SAMPLING = "--speculative-use-rejection-sampling"


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    Attributes:
        internals: the adapter to the release's internals.
        refused: the features that the plugin refuses with this release, each with the reason.
    """

    internals: Internals
    refused: Mapping[Feature, str] = field(default_factory=dict)


_NO_PLUGINS_IN_WORKERS = {Feature.HTTP_WORKERS: "SGLang's HTTP workers load no plugins"}
_BEFORE_0_5_23 = {
    **_NO_PLUGINS_IN_WORKERS,
    Feature.RESUMED: "SGLang does not send all tokens of a request that is aborted in the scheduler's queue",
}
_UNTESTED = {Feature.SPECULATIVE: "candidate sets were not tested with speculative decoding"}
_OTHER_REJECTION = {
    Feature.REJECTION_SAMPLING: "the kernel of rejection sampling was checked on SGLang 0.5.23 only"
}
_BEFORE_0_5_20 = {
    **_BEFORE_0_5_23,
    Feature.SAMPLER_SOURCE: "SGLang's sampler does not return the probabilities that it drew from",
}
_BEFORE_0_5_19 = {
    **_BEFORE_0_5_20,
    Feature.PIPELINE: "SGLang does not send a plugin's output from one pipeline stage to the next",
    Feature.WEIGHT_VERSIONS: "SGLang's scheduler does not know its weight version",
}
_BEFORE_0_5_13 = {
    **_BEFORE_0_5_19,
    # Two defects of SGLang 0.5.12 rule out disaggregation. The scheduler of a prefill server sends the top
    # log-probs to the HTTP process as tensors, not as lists. With the transfer backend nixl, SGLang completes
    # a transfer of the KV cache only for hybrid models.
    Feature.DISAGGREGATION: "a request with `top_logprobs_num` crashes SGLang's prefill server",
}

RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        "0.5.23": Release(Sglang0523()),
        "0.5.22": Release(Sglang0521(), _BEFORE_0_5_23 | _OTHER_REJECTION),
        "0.5.21": Release(Sglang0521(), _BEFORE_0_5_23 | _OTHER_REJECTION),
        "0.5.20": Release(Sglang0520(), _BEFORE_0_5_23 | _OTHER_REJECTION),
        "0.5.19": Release(Sglang0519(), _BEFORE_0_5_20 | _OTHER_REJECTION),
        "0.5.18": Release(Sglang0518(), _BEFORE_0_5_19 | _OTHER_REJECTION),
        "0.5.17": Release(Sglang0516(), _BEFORE_0_5_19 | _OTHER_REJECTION),
        "0.5.16": Release(Sglang0516(), _BEFORE_0_5_19 | _OTHER_REJECTION),
        "0.5.15.post1": Release(Sglang0515(), _BEFORE_0_5_19 | _OTHER_REJECTION),
        # Speculative decoding was tested on 0.5.15.post1. The plugin also serves speculative decoding on
        # 0.5.15, because the SGLang functions that the hooks wrap are the same in 0.5.15 and 0.5.15.post1.
        "0.5.15": Release(Sglang0515(), _BEFORE_0_5_19 | _OTHER_REJECTION),
        "0.5.14": Release(Sglang0514(), _BEFORE_0_5_19 | _UNTESTED),
        "0.5.13.post1": Release(Sglang0513(), _BEFORE_0_5_19 | _UNTESTED),
        "0.5.13": Release(Sglang0513(), _BEFORE_0_5_19 | _UNTESTED),
        "0.5.12.post1": Release(Sglang0512(), _BEFORE_0_5_13 | _UNTESTED),
        "0.5.12": Release(Sglang0512(), _BEFORE_0_5_13 | _UNTESTED),
    }
)
"""The supported releases by version, newest first."""

UNLISTED = Release(Sglang0523(), dict.fromkeys(Feature, "is not a supported release"))
"""Any release that `RELEASES` does not list.

On an unlisted release, the hooks only refuse requests for sets and report problems."""


@cache
def installed() -> tuple[str, Release]:
    """Return the version and the `Release` of the installed SGLang.

    If SGLang is not installed, the version is an empty string.
    """
    try:
        name = version("sglang")
    except PackageNotFoundError:
        name = ""
    return name, RELEASES.get(name, UNLISTED)


def internals() -> Internals:
    """Return the adapter for the internals of the installed SGLang."""
    return installed()[1].internals


def refused(feature: Feature) -> str:
    """Return why the plugin refuses a feature on the installed SGLang, or "" for an allowed feature."""
    return installed()[1].refused.get(feature, "")
