"""Which SGLang releases the patch set supports, and every seam that it stands on in each.

A seam is a function of SGLang's that a hook wraps, or one that a hook calls. What is checked at start
is that it exists and takes the parameters that the hooks rely on. A release that is not listed is
refused even where every seam seems to hold: a signature does not tell what a log-prob means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["RELEASES", "Seam"]


@dataclass(frozen=True)
class Seam:
    """One place in SGLang that the patch set depends on.

    Attributes:
        target: dotted path, `module.attribute` or `module.Class.method`.
        parameters: the leading parameter names that must stand in the signature, in this order.
        purpose: what the patch set does there.
        hooked: whether a hook replaces it (otherwise the patch set only calls or extends it).
    """

    target: str
    parameters: tuple[str, ...]
    purpose: str
    hooked: bool = True


_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_OPENAI = "sglang.srt.entrypoints.openai"
_ANSWERED_FROM = ("self", "adapted_request", "request", "raw_request")

_SGLANG_0_5_23 = (
    Seam(
        "sglang.srt.managers.io_struct.GenerateReqInput",
        ("text", "input_ids"),
        "the request gains top_logprobs_p, top_logprobs_source and return_logprobs_in_base64",
        hooked=False,
    ),
    Seam(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        ("self",),
        "thresholds are checked, spread over the batch and handed to the scheduler",
    ),
    Seam(
        "sglang.srt.managers.io_struct.GenerateReqInput.__getitem__",
        ("self", "i"),
        "the parts of a batch keep their threshold",
    ),
    Seam(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        ("body",),
        "bad input is answered with HTTP 400 before a stream begins",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        ("self", "req"),
        "a threshold that came past the checks ends its request",
    ),
    Seam(
        "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle.submit_request",
        ("self", "req_dict"),
        "gRPC, which cannot carry candidate sets, refuses the request",
    ),
    Seam(
        "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._submit_openai",
        ("self", "serving_key", "streaming", "json_body"),
        "so do its OpenAI calls",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        ("self", "error_msg"),
        "a request is refused in the scheduler",
        hooked=False,
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT",
        ("message", "status_code", "err_type"),
        "a request whose sets grow beyond the budget ends with an error",
        hooked=False,
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        "a forward pass learns its rows' thresholds",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ("self", "logits_output", "forward_batch"),
        "the sampled rows' sets join the forward pass's output",
    ),
    Seam(
        "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        ("self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids"),
        "the sets are taken from the log-probs that SGLang reports",
    ),
    Seam(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        "the sampler's weights after its filters are captured, as SGLang does for its own mask",
    ),
    Seam(
        "sglang.srt.runtime_context.get_exec",
        (),
        "which backend samples",
        hooked=False,
    ),
    Seam(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        ("probs", "top_ks", "sampling_seed", "return_filtered_probs", "max_top_k"),
        "and no more of a row is sorted for that than top_k keeps",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        ("self", "new_version"),
        "the name of the weights in force changes between two passes",
        hooked=False,
    ),
    Seam("sglang.srt.runtime_context.get_serving", (), "where that name stands", hooked=False),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        (
            "extend_logprob_pruned_lens_cpu",
            "top_logprobs_nums",
            "extend_input_logprob_token_ids_gpu",
            "input_logprob_indices_cpu",
        ),
        "which rows of a pass score which prompt tokens",
        hooked=False,
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.compute_logprobs_only",
        ("self", "logits_output", "forward_batch"),
        "a pass that only scores prompts hands its sets on",
    ),
    Seam(
        "sglang.srt.layers.logprob_processor.compute_row_log_normalizer",
        ("logits",),
        "prompt log-probs are computed as SGLang computes them",
        hooked=False,
    ),
    Seam(
        "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward",
        (
            "self",
            "pruned_states",
            "sample_indices",
            "input_logprob_indices",
            "token_to_seq_idx",
            "lm_head",
            "get_logits_fn",
            "logits_metadata",
        ),
        "the prompt positions' sets are taken from the logits that SGLang scores the prompt with",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        ("self", "reqs", "return_logprob"),
        "sets that were sent are let go of",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer"
        ".SchedulerOutputStreamer.is_request_level_customized_info_key",
        ("self", "key"),
        "the prompt's sets go out once per request",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
        ("self",),
        "a prompt that is scored again after a retraction is not counted twice",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        ("self", "new_accepted_len"),
        "the token that was drawn when an abort came may end the answer by itself",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.tail_str",
        ("self", "new_accepted_len"),
        "stop strings are found across the cut of an answer that is resumed",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.init_incremental_detokenize",
        ("self",),
        "so is its text made",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
        ("self", "abort_req", "req"),
        "a request that is aborted while it waits is sent with all of its tokens",
    ),
    Seam(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        ("self", "decode_req"),
        "a decode server learns that the first token's set is on the prefill server",
    ),
    Seam(
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
        ("self",),
        "a prefill server is asked for it beside the KV cache",
    ),
    Seam(
        "sglang.srt.utils.network.NetworkAddress",
        ("host", "port"),
        "where the prefill server is asked",
        hooked=False,
    ),
    Seam(
        "sglang.srt.managers.scheduler_pp_mixin.add_auxiliary_output_to_pp_tensors",
        ("tensors", "output"),
        "the sets leave the last pipeline stage",
    ),
    Seam(
        "sglang.srt.managers.scheduler_pp_mixin.pop_auxiliary_output_from_pp_tensors",
        ("tensors", "observer"),
        "the sets arrive in the first pipeline stage",
    ),
    Seam(
        "sglang.srt.managers.auxiliary_output.append_auxiliary_output",
        ("current", "output"),
        "the sets travel to the host with SGLang's own copy",
        hooked=False,
    ),
    Seam(
        "sglang.srt.managers.auxiliary_output.CommittedTokens",
        ("output_index", "token_ids"),
        "SGLang says which tokens became visible",
        hooked=False,
    ),
    Seam(
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        ("self", "recv_obj"),
        "the detokenizer gives back what large sets took on their way",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_batch_output",
        ("self", "recv_obj"),
        "the sets arrive from the scheduler",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.add_logprob_to_meta_info",
        (
            "self",
            "meta_info",
            "state",
            "top_logprobs_num",
            "token_ids_logprob",
            "return_text_in_logprobs",
            "finished",
        ),
        "the sets are written into meta_info",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._coalesce_streaming_chunks",
        ("self", "out_list", "rid"),
        "streamed chunks that SGLang merges keep all their sets",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._stream_one_response",
        ("self", "obj", "state", "request"),
        "the sets are written into a chunk when it is sent",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_abort_req",
        ("self", "recv_obj"),
        "the last chunk of a request that is aborted while it waits repeats nothing",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        ("meta_info", "last_output_offset"),
        "which fields of a chunk hold one entry for each token",
        hooked=False,
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.generate_request",
        ("self", "obj", "request"),
        "the fields of a call in process join its request; the sets for OpenAI's form are listened for",
    ),
    Seam(
        f"{_ENGINE}.generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "an engine in process takes the fields as keywords",
    ),
    Seam(
        f"{_ENGINE}.async_generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "so does its other method",
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._handle_non_streaming_request",
        _ANSWERED_FROM,
        "/v1/completions passes the fields on and answers with the sets",
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._generate_completion_stream",
        _ANSWERED_FROM,
        "so do its streams",
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._handle_non_streaming_request",
        _ANSWERED_FROM,
        "/v1/chat/completions passes the fields on and answers with the sets",
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._generate_chat_stream",
        _ANSWERED_FROM,
        "so do its streams",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.abort_request",
        ("self", "rid"),
        "a call whose sets do not fit is ended",
        hooked=False,
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.__init__",
        ("self", "server_args"),
        "modes in which the sets cannot be exact refuse the request; routes without sets are guarded",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.get_internal_state",
        ("self",),
        "the schedulers report whether they are patched",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        ("self", "recv_req"),
        "a scheduler reports whether it is patched",
    ),
    Seam(
        "sglang.srt.utils.common.build_server_info",
        ("server_args", "scheduler_info"),
        "GET /server_info tells whether the patch set holds",
    ),
)

RELEASES: Mapping[str, tuple[Seam, ...]] = MappingProxyType({"0.5.23": _SGLANG_0_5_23})
"""SGLang version to its seams."""
