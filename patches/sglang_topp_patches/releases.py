"""Which SGLang releases the patch set serves, with what each of them has, and what is refused there.

This is the one place that knows releases. A release is a generation of SGLang's internals (`internals`),
the seams that it has (`seam_groups`), and the features that it cannot have. One that is not listed is
refused even where every seam seems to hold: a signature does not tell what a log-prob means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from sglang_topp_patches import seam_groups as seams
from sglang_topp_patches.internals.auxiliary_output import AuxiliaryOutput, SingleAuxiliaryOutput
from sglang_topp_patches.internals.customized_info import CustomizedInfo, CustomizedInfoOneNormalizer
from sglang_topp_patches.internals.interface import Internals
from sglang_topp_patches.internals.sampler_logprobs import (
    SamplerLogprobs,
    SamplerLogprobsOfWorkerBatch,
    SamplerLogprobsUnaligned,
    SamplerLogprobsWithoutContext,
)
from sglang_topp_patches.seam_groups import Seam

__all__ = ["RELEASES", "UNLISTED", "Feature", "Release", "installed", "internals", "refused"]


class Feature(StrEnum):
    """What a release may be refused, by the name that users know it by."""

    SAMPLER_SOURCE = "top_logprobs_source"
    WEIGHT_VERSIONS = "weight_versions"
    PIPELINE = "--pp-size"
    DISAGGREGATION = "--disaggregation-mode"
    HTTP_WORKERS = "--tokenizer-worker-num"
    RESUMED = "resumed_tokens"


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    Attributes:
        internals: what the hooks need of it.
        seams: where they stand, and what they call.
        refused: what is not served there, and why.
    """

    internals: Internals
    seams: tuple[Seam, ...]
    refused: Mapping[Feature, str] = field(default_factory=dict)


_ALL = (*seams.SERVED, *seams.IN_PROCESS, *seams.OPENAI, *seams.DISAGGREGATION)

_WITH_AUXILIARY_OUTPUT = (
    *_ALL,
    *seams.GRPC,
    *seams.STREAMER,
    *seams.LOGPROB_PROCESSORS,
    *seams.NORMALIZER,
    *seams.ONE_RESPONSE,
    *seams.WEIGHT_VERSIONS,
    *seams.AUXILIARY_OUTPUT,
)
_BEFORE_AUXILIARY_OUTPUT = (
    *_ALL,
    *seams.PROMPT_ROWS,
    *seams.COPIED_BY_US,
    *seams.WAITING,
    *seams.HTTP_ADDITIONS,
)
_WITH_PROCESSORS = (
    *_BEFORE_AUXILIARY_OUTPUT,
    *seams.GRPC,
    *seams.COMMITTED_BY_US,
    *seams.LOGPROB_PROCESSORS,
)

_NO_PLUGINS_IN_WORKERS = {
    Feature.HTTP_WORKERS: "SGLang's HTTP workers load no plugins, and their application cannot be chosen"
}
_BEFORE_0_5_23 = {
    **_NO_PLUGINS_IN_WORKERS,
    Feature.RESUMED: "SGLang has no function that sends a request which is aborted while it waits",
}
_BEFORE_0_5_20 = {
    **_BEFORE_0_5_23,
    Feature.SAMPLER_SOURCE: "SGLang's sampler does not hand out what it drew from",
}
_BEFORE_0_5_19 = {
    **_BEFORE_0_5_20,
    Feature.PIPELINE: "SGLang hands nothing of an extension's on from stage to stage",
    Feature.WEIGHT_VERSIONS: "SGLang's scheduler is not told the name of its weights",
}
_BEFORE_0_5_13 = {
    **_BEFORE_0_5_19,
    # Its tensors reach the HTTP process as they are. 0.5.12 also ends nixl transfers for hybrid models alone.
    Feature.DISAGGREGATION: "a request for `top_logprobs_num` ends SGLang's prefill server",
}

_SGLANG_0_5_22 = (
    *_WITH_AUXILIARY_OUTPUT,
    *seams.CONTRACT,
    *seams.COMPOSED,
    *seams.SAMPLER_SOURCE,
    *seams.HIGHEST,
    *seams.SCORED_ON_HOST,
    *seams.DETOKENIZER,
)
_SGLANG_0_5_20 = (
    *_WITH_AUXILIARY_OUTPUT,
    *seams.SOME_STATUSES,
    *seams.HTTP_ADDITIONS,
    *seams.COMPOSED,
    *seams.SAMPLER_SOURCE,
    *seams.PROMPT_ROWS,
)
_SGLANG_0_5_13 = (*_BEFORE_AUXILIARY_OUTPUT, *seams.COMMITTED_BY_US, *seams.SAMPLER_LOGPROBS)
_SGLANG_0_5_14 = (*_SGLANG_0_5_13, *seams.GRPC)
_SGLANG_0_5_12 = (
    *_BEFORE_AUXILIARY_OUTPUT,
    *seams.PROMPT_IDS,
    *seams.COMMITTED_IN_MIXIN,
    *seams.SAMPLER_LOGPROBS,
)

RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        "0.5.23": Release(AuxiliaryOutput(), (*_SGLANG_0_5_22, *seams.RESUMED)),
        "0.5.22": Release(AuxiliaryOutput(), (*_SGLANG_0_5_22, *seams.SOME_STATUSES), _BEFORE_0_5_23),
        "0.5.21": Release(AuxiliaryOutput(), _SGLANG_0_5_20, _BEFORE_0_5_23),
        "0.5.20": Release(AuxiliaryOutput(), _SGLANG_0_5_20, _BEFORE_0_5_23),
        "0.5.19": Release(
            SingleAuxiliaryOutput(),
            (*_WITH_AUXILIARY_OUTPUT, *seams.SOME_STATUSES, *seams.HTTP_ADDITIONS, *seams.PROMPT_ROWS),
            _BEFORE_0_5_20,
        ),
        "0.5.18": Release(CustomizedInfo(), (*_WITH_PROCESSORS, *seams.NORMALIZER), _BEFORE_0_5_19),
        "0.5.17": Release(CustomizedInfoOneNormalizer(), _WITH_PROCESSORS, _BEFORE_0_5_19),
        "0.5.16": Release(CustomizedInfoOneNormalizer(), _WITH_PROCESSORS, _BEFORE_0_5_19),
        "0.5.15.post1": Release(SamplerLogprobs(), _SGLANG_0_5_14, _BEFORE_0_5_19),
        "0.5.15": Release(SamplerLogprobs(), _SGLANG_0_5_14, _BEFORE_0_5_19),
        "0.5.14": Release(SamplerLogprobsUnaligned(), _SGLANG_0_5_14, _BEFORE_0_5_19),
        "0.5.13.post1": Release(SamplerLogprobsWithoutContext(), _SGLANG_0_5_13, _BEFORE_0_5_19),
        "0.5.13": Release(SamplerLogprobsWithoutContext(), _SGLANG_0_5_13, _BEFORE_0_5_19),
        "0.5.12.post1": Release(SamplerLogprobsOfWorkerBatch(), _SGLANG_0_5_12, _BEFORE_0_5_13),
        "0.5.12": Release(SamplerLogprobsOfWorkerBatch(), _SGLANG_0_5_12, _BEFORE_0_5_13),
    }
)
"""SGLang version to what it has, the newest first."""

_REFUSING = (*_ALL, *seams.CONTRACT, *seams.GRPC, *seams.HTTP_ADDITIONS)

UNLISTED = Release(AuxiliaryOutput(), _REFUSING, dict.fromkeys(Feature, "is not a supported release"))
"""A release that is not listed: where to refuse and report, as far as it has such places."""


@cache
def installed() -> tuple[str, Release]:
    """The installed SGLang's version, empty where there is none, and its release."""
    try:
        name = version("sglang")
    except PackageNotFoundError:
        name = ""
    return name, RELEASES.get(name, UNLISTED)


def internals() -> Internals:
    """The installed SGLang's insides."""
    return installed()[1].internals


def refused(feature: Feature) -> str:
    """Why the installed SGLang does not have a feature here, or nothing."""
    return installed()[1].refused.get(feature, "")
