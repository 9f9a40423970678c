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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from sglang_topp_patches.hooks import Seam
from sglang_topp_patches.set_buffer import KEY, SetBuffer

CALLED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.append_auxiliary_output",
        "Copy the sets to the host with SGLang's own results.",
        ("current", "output"),
        since="0.5.20",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        "Rely on a new weight version only between two passes.",
        ("new_version",),
        since="0.5.19",
    ),
    Seam("sglang.srt.runtime_context.get_serving", "Read the weight version.", since="0.5.19"),
    Seam("sglang.srt.runtime_context.get_exec", "Read which backend samples.", since="0.5.20"),
    Seam(
        "sglang.srt.layers.logprob_processor.compute_row_log_normalizer",
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
_PACKAGE = "sgl_kernel"


def _imported(name: str) -> Any:
    """Import and return a module, or return None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Sglang0523:
    """Adapter to SGLang 0.5.23 and later."""

    # -- Hooks in the scheduler call the following methods.

    def carry(self, top_logprobs_nums: list[int], batch: Any, forward_batch: Any) -> None:
        """Replace the list `top_logprobs_nums` in the batch objects that a forward pass reads.

        Args:
            top_logprobs_nums: the new list, a `requested_rows.TopLogprobsNums`.
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
        logits_output.auxiliary_device_output = self.append(logits_output.auxiliary_device_output, output)

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs of one forward pass, each of which may be None."""
        from sglang.srt.managers.auxiliary_output import append_auxiliary_output

        return append_auxiliary_output(current, output)

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
        """Return whether `SGLANG_SANITIZE_NAN_LOGITS` is on. It's off by default.

        If a grammar forbids every token of a row, only with this setting do the other requests of the pass
        succeed.
        """
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())

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
        if not processor.enable_fast_input_logprobs:
            return torch.nn.functional.log_softmax(logits, dim=-1)
        from sglang.srt.layers.logprob_processor import compute_row_log_normalizer

        row_max, row_log_sum = compute_row_log_normalizer(logits)
        logprobs: torch.Tensor = (logits.float() - row_max[:, None]) - row_log_sum[:, None]
        return logprobs

    def align(self, reqs: Sequence[Any]) -> None:
        """Give all `reqs` the same keys in `customized_info`, where SGLang needs that (up to 0.5.14)."""

    # -- Hooks in the HTTP process call the following methods.

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return a scheduler message's `customized_info`: for each key, a list with one entry per request."""
        from sglang.srt.managers.io_struct import unwrap_from_pickle

        return unwrap_from_pickle(getattr(recv_obj, "customized_info", None)) or {}

    def streams_increments(self, manager: Any) -> bool:
        """Return whether a streamed chunk holds only the new tokens, instead of all tokens so far.

        `manager` is SGLang's `TokenizerManager`.
        """
        return bool(manager.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Return whether the server runs without a tokenizer."""
        return bool(manager.skip_tokenizer_init)


Internals = Sglang0523
"""The interface of all adapters."""


class Sglang0521(Sglang0523):
    """Adapter to SGLang 0.5.21 and 0.5.22, where each call of `eagle_sample` imports the sampling kernel."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import the sampling kernel's module.

        SGLang itself contains the sampling kernel for CUDA devices. The package `sgl_kernel` contains the
        sampling kernel for other GPUs.
        """
        from sglang.srt.utils.common import is_cuda

        name = "sglang.kernels.ops.speculative.sampling" if is_cuda() else _PACKAGE
        return ((_imported(name), _KERNEL),)


class Sglang0520(Sglang0521):
    """Adapter to SGLang 0.5.20, where the sampling kernel comes from the package `sgl_kernel`."""

    def verification_kernels(self) -> Sequence[tuple[Any, str]]:
        """Import `sgl_kernel`, the package that contains the sampling kernel of SGLang 0.5.20 and earlier."""
        return ((_imported(_PACKAGE), _KERNEL),)


class Sglang0519(Sglang0520):
    """Adapter to SGLang 0.5.19, where a forward pass has at most one auxiliary output."""

    def append(self, current: Any, output: Any) -> Any:
        """Combine two auxiliary outputs of a forward pass, as SGLang 0.5.20 and later do themselves."""
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


_FIELD = "sglang_topp_device_output"


def take(logits_output: Any) -> Any:
    """Remove and return the candidate sets of a `LogitsProcessorOutput`, or return None if it has none."""
    output = getattr(logits_output, _FIELD, None)
    if output is not None:
        setattr(logits_output, _FIELD, None)
    return output


class Sglang0518(Sglang0519):
    """Adapter to SGLang 0.5.18."""

    def begin_pass(self, logits_output: Any) -> None:
        """Remove the candidate sets of an earlier pass, because SGLang reuses `logits_output`."""
        take(logits_output)

    def attach(self, logits_output: Any, output: Any) -> None:
        """Store the sets in a new attribute of `logits_output`, because SGLang has no field for the sets."""
        setattr(logits_output, _FIELD, self.append(take(logits_output), output))

    def weight_version(self) -> str:
        """Return an empty string: in these releases, the scheduler does not know the weight version."""
        return ""


class Sglang0516(Sglang0518):
    """Adapter to SGLang 0.5.16 and 0.5.17, which score all prompts with `log_softmax`."""

    def input_logprobs(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        """Compute the log-probs with `log_softmax`, as these releases do for every prompt."""
        return torch.nn.functional.log_softmax(logits, dim=-1)


class Sglang0515(Sglang0516):
    """Adapter to SGLang 0.5.15 and 0.5.15.post1."""

    def streams_increments(self, manager: Any) -> bool:
        """Read `incremental_streaming_output` from the server arguments."""
        return bool(manager.server_args.incremental_streaming_output)

    def skips_tokenizer(self, manager: Any) -> bool:
        """Read `skip_tokenizer_init` from the server arguments."""
        return bool(manager.server_args.skip_tokenizer_init)


class Sglang0514(Sglang0515):
    """Adapter to SGLang 0.5.14, which sends `customized_info` only for requests that have it."""

    def align(self, reqs: Sequence[Any]) -> None:
        """If a request has a `SetBuffer`, give one to every request.

        SGLang sends the values of a `customized_info` key only for the requests that have the key. SGLang's
        `TokenizerManager` looks up each request's value by the request's position in the whole batch. If one
        request lacked the key, SGLang would give some requests the values of other requests.
        """
        if any(req.customized_info and KEY in req.customized_info for req in reqs):
            for req in reqs:
                req.customized_info = req.customized_info or {}
                req.customized_info.setdefault(KEY, SetBuffer())

    def take_customized_info(self, recv_obj: Any) -> dict[str, Any]:
        """Return the field itself, which is no pickle up to SGLang 0.5.14."""
        return getattr(recv_obj, "customized_info", None) or {}


class Sglang0513(Sglang0514):
    """Adapter to SGLang 0.5.13 and 0.5.13.post1, which lack the module `runtime_context`."""

    def answers_requests(self) -> bool:
        """Return whether this process has rank 0 in both attention groups (tensor and context parallel)."""
        from sglang.srt.layers.dp_attention import get_attention_cp_rank, get_attention_tp_rank

        return bool(get_attention_tp_rank() == 0 and get_attention_cp_rank() == 0)

    def sanitizes_logits(self) -> bool:
        """Return False: SGLang 0.5.12 and 0.5.13 have no setting that sanitizes logits."""
        return False


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
    Feature.ROUTES: "it was not tested, because SGLang's buffer of routed experts needs a GPU here",
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
