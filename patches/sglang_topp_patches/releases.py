"""The supported SGLang releases: an adapter to each one's internals, and the features that it cannot serve.

A hook itself names the releases that it belongs to (`hooks`). No other module looks up SGLang's release
number. Candidate sets are refused on an unlisted release even if the signatures of all hooked functions
match, because a signature does not show how a release defines its log-probs.

The name of an adapter contains the oldest release that it serves. The adapter to the newest releases is the
base class, and each other one derives from the next newer one. Before 0.5.19, SGLang does not copy a plugin's
results to the host, so `scheduler.host_copy_before_0_5_19` copies the candidate sets. Before 0.5.16, the
sampler computes the log-probs of the sampled tokens, not a log-prob processor.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from sglang_topp_patches.hooks import Seam, release_key

_ROW_NORMALIZER = "sglang.srt.layers.logprob_processor.compute_row_log_normalizer"
CALLED = (
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        "Rely on a new weight version only between two passes.",
        ("new_version",),
        since="0.5.19",
    ),
    Seam("sglang.srt.runtime_context.get_serving", "Read the weight version.", since="0.5.19"),
    Seam("sglang.srt.runtime_context.get_exec", "Read which backend samples.", since="0.5.20"),
    Seam(
        _ROW_NORMALIZER,
        "Compute prompt log-probs as SGLang does.",
        ("logits",),
        since="0.5.18",
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        "Read on the host which rows of a pass score prompt tokens.",
        keywords=("input_logprob_indices_cpu",),
        since="0.5.21",
    ),
)

_KERNEL = "tree_speculative_sampling_target_only"


def append(current: Any, output: Any) -> Any:
    """Combine two auxiliary outputs of one forward pass, each of which may be None."""
    if current is None or output is None:
        return current or output
    return Outputs((*getattr(current, "outputs", (current,)), *getattr(output, "outputs", (output,))))


@dataclass(frozen=True)
class Outputs:
    """Several auxiliary outputs of one forward pass, on the device or on the host.

    Attributes:
        outputs: the auxiliary outputs. `Outputs.consume` calls their `consume` methods in this order.
    """

    outputs: tuple[Any, ...]

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
        """Start to copy the tensors of every auxiliary output to the host."""
        return Outputs(tuple(output.copy_to_host(copy_tensor) for output in self.outputs))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Call the method `consume` of every auxiliary output."""
        for output in self.outputs:
            output.consume(batch, commits)


class Sglang0523:
    """Adapter to SGLang 0.5.23 and later."""

    # -- Hooks in the scheduler call the following methods.

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the list `top_logprobs_nums` in the batch objects that a forward pass reads.

        Args:
            top_logprobs_nums: the new list, a `scheduler.step.TopLogprobsNums`.
            batch: the batch from which SGLang made the `ForwardBatch`.
            forward_batch: the `ForwardBatch`, which every function of the pass receives.
        """
        forward_batch.top_logprobs_nums = top_logprobs_nums

    def begin_pass(self, logits_output: Any) -> None:
        """Remove an earlier pass's sets from `logits_output`. SGLang itself does that when it samples."""

    def attach(self, logits_output: Any, output: Any) -> None:
        """Add an object with sets to the pass's auxiliary output, which SGLang copies to the host.

        SGLang calls `output.copy_to_host` first, and `output.consume` after it has added the new tokens to
        their requests.
        """
        logits_output.auxiliary_device_output = append(logits_output.auxiliary_device_output, output)

    def answers_requests(self) -> bool:
        """Return whether SGLang sends this rank's results to the client.

        Only those of rank 0 in both attention groups (tensor and context parallel) are sent.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)

    def weight_version(self) -> str:
        """Return the current weight version, or "" if the scheduler knows none.

        SGLang changes the weights and their version only between forward passes, in the thread that launches
        the passes. All rows of a forward pass therefore have the same weight version.
        """
        from sglang.srt.runtime_context import get_serving

        version: str = get_serving().weight_version
        return version

    def sampling(self) -> tuple[str, bool]:
        """Return the sampling backend, and whether `--rl-on-policy-target` is set.

        Raises:
            ValueError: SGLang has not set its configuration in this process.
        """
        from sglang.srt.runtime_context import get_exec

        settings = get_exec()
        return settings.kernel.sampling_backend, bool(settings.deterministic.rl_on_policy_target)

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Return a (module, attribute name) pair for each sampling kernel that `eagle_sample` looks up.

        They are the target-only and the rejection kernel. The module is None if it is not imported. On a
        device without a sampling kernel, it may lack the attribute.
        """
        # `eagle_sample` is defined in `eagle_utils`, which imports the two kernels below at its top level.
        module = sys.modules.get("sglang.srt.speculative.eagle_utils")
        return (module, _KERNEL), (module, "chain_speculative_sampling_triton")

    def sanitizes_logits(self) -> bool:
        """Return whether `SGLANG_SANITIZE_NAN_LOGITS` is on. It's off by default, and new in 0.5.14.

        If a grammar forbids every token of a row, only with this setting do the other requests of the pass
        succeed.
        """
        from sglang.srt.environ import envs

        setting = getattr(envs, "SGLANG_SANITIZE_NAN_LOGITS", None)
        return setting is not None and bool(setting.get())

    def scored_rows(self, metadata: Any, indices: torch.Tensor) -> Sequence[int]:
        """Return the indices of the logits rows that score prompt tokens, as a sequence on the host.

        The indices ascend. SGLang 0.5.21 and later keep a copy of them on the host. Before, this method waits
        for the device.

        Args:
            metadata: SGLang's `LogitsMetadata` of the forward pass.
            indices: int64, the same indices in a tensor on the device.
        """
        on_host: Sequence[int] | None = getattr(metadata, "input_logprob_indices_cpu", None)
        return indices.tolist() if on_host is None else on_host

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute a prompt's log-probs with the operations that SGLang uses, in the same order.

        Args:
            processor: SGLang's `InputLogprobProcessor`. Before SGLang 0.5.16: SGLang's `LogitsProcessor`.
            logits: float [R, V], the logits of R rows over the V tokens of the vocabulary.
        """
        if not getattr(processor, "enable_fast_input_logprobs", False):  # new in 0.5.18
            return torch.nn.functional.log_softmax(logits, dim=-1)
        row_max, row_log_sum = pkgutil.resolve_name(_ROW_NORMALIZER)(logits)
        logprobs: torch.Tensor = (logits.float() - row_max[:, None]) - row_log_sum[:, None]
        return logprobs


Internals = Sglang0523
"""The interface of all adapters."""


class Sglang0519(Sglang0523):
    """Adapter to SGLang 0.5.19 to 0.5.22."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import the modules that may have the sampling kernel. Each call of `eagle_sample` imports one.

        From 0.5.21 on, SGLang itself has the kernel for CUDA devices. The package `sgl_kernel` has that for
        other GPUs, and all kernels before.
        """
        kernels = []
        for name in ("sglang.kernels.ops.speculative.sampling", "sgl_kernel"):
            with suppress(ImportError):
                kernels.append((importlib.import_module(name), _KERNEL))
        return kernels


_FIELD = "sglang_topp_device_output"


def take(logits_output: Any) -> Any:
    """Remove and return the candidate sets of a `LogitsProcessorOutput`, or return None if it has none."""
    output = getattr(logits_output, _FIELD, None)
    if output is not None:
        setattr(logits_output, _FIELD, None)
    return output


class Sglang0516(Sglang0519):
    """Adapter to SGLang 0.5.16 to 0.5.18."""

    def begin_pass(self, logits_output: Any) -> None:
        """Remove the candidate sets of an earlier pass, because SGLang reuses `logits_output`."""
        take(logits_output)

    def attach(self, logits_output: Any, output: Any) -> None:
        """Store the sets in a new attribute of `logits_output`, because SGLang has no field for the sets."""
        setattr(logits_output, _FIELD, append(take(logits_output), output))

    def weight_version(self) -> str:
        """Return an empty string: in these releases, the scheduler does not know the weight version."""
        return ""


class Sglang0513(Sglang0516):
    """Adapter to SGLang 0.5.13 to 0.5.15.post1."""

    def answers_requests(self) -> bool:
        """Return whether this process has rank 0 in both attention groups (tensor and context parallel)."""
        from sglang.srt.layers.dp_attention import get_attention_cp_rank, get_attention_tp_rank

        return bool(get_attention_tp_rank() == 0 and get_attention_cp_rank() == 0)


class Sglang0512(Sglang0513):
    """Adapter to SGLang 0.5.12 and 0.5.12.post1, whose `compute_logprobs_only` takes a `ModelWorkerBatch`."""

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Set `top_logprobs_nums` on the `ForwardBatch` and on the pass's `ModelWorkerBatch`."""
        super().carry(top_logprobs_nums, batch, forward_batch)
        batch.top_logprobs_nums = top_logprobs_nums


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
    ROUTES = "return_routed_experts"
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


_SUPPORTED = (
    "0.5.23 0.5.22 0.5.21 0.5.20 0.5.19 0.5.18 0.5.17 0.5.16 0.5.15.post1 0.5.15 0.5.14 0.5.13.post1 0.5.13"
    " 0.5.12.post1 0.5.12"
)
# Each adapter, newest first, with the first release that it serves.
_ADAPTERS: tuple[tuple[str, Internals], ...] = (
    ("0.5.23", Sglang0523()),
    ("0.5.19", Sglang0519()),
    ("0.5.16", Sglang0516()),
    ("0.5.13", Sglang0513()),
    ("0.5.12", Sglang0512()),
)
# Each feature with the first release that serves it, and the reason why earlier ones do not.
_SERVED_SINCE = (
    (Feature.HTTP_WORKERS, "0.5.23", "SGLang's HTTP workers load no plugins"),
    (
        Feature.RESUMED,
        "0.5.23",
        "SGLang does not send all tokens of a request that is aborted in the scheduler's queue",
    ),
    (
        Feature.REJECTION_SAMPLING,
        "0.5.23",
        "the kernel of rejection sampling was checked on SGLang 0.5.23 only",
    ),
    (
        Feature.SAMPLER_SOURCE,
        "0.5.20",
        "SGLang's sampler does not return the probabilities that it drew from",
    ),
    (
        Feature.PIPELINE,
        "0.5.19",
        "SGLang does not send a plugin's output from one pipeline stage to the next",
    ),
    (Feature.WEIGHT_VERSIONS, "0.5.19", "SGLang's scheduler does not know its weight version"),
    # Speculative decoding was tested on 0.5.15.post1. On 0.5.15, the functions that the hooks wrap are the
    # same.
    (Feature.SPECULATIVE, "0.5.15", "candidate sets were not tested with speculative decoding"),
    # Two defects of SGLang 0.5.12 rule out disaggregation. The scheduler of a prefill server sends the top
    # log-probs to the HTTP process as tensors, not as lists. With the transfer backend nixl, SGLang completes
    # a transfer of the KV cache only for hybrid models.
    (Feature.DISAGGREGATION, "0.5.13", "a request with `top_logprobs_num` crashes SGLang's prefill server"),
    (Feature.ROUTES, "0.5.13", "SGLang gives some requests of a batch the experts of others"),
)


def _release(name: str) -> Release:
    at = release_key(name)
    internals = next(adapter for since, adapter in _ADAPTERS if release_key(since) <= at)
    return Release(internals, {what: why for what, since, why in _SERVED_SINCE if at < release_key(since)})


RELEASES: Mapping[str, Release] = MappingProxyType({name: _release(name) for name in _SUPPORTED.split()})
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
