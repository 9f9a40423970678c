"""Every place in SGLang that the patch set stands on, in groups that a release has or has not.

A seam is a function of SGLang's that hooks wrap, or one that a hook calls. What is checked at start is that
it exists and takes the parameters that the hooks rely on. `releases` says which groups make up a release.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hook", "Seam"]


@dataclass(frozen=True)
class Hook:
    """A function of ours at a seam.

    Attributes:
        kind: BEFORE, AFTER or AROUND, as SGLang's `HookType` names them.
        function: `module.function` of this package.
        always: whether it stands there also where sets are refused: it refuses, or reports.
    """

    kind: str
    function: str
    always: bool = False


@dataclass(frozen=True)
class Seam:
    """One place in SGLang that the patch set depends on.

    Attributes:
        target: dotted path, `module.attribute` or `module.Class.method`.
        parameters: the leading parameter names that must stand in the signature, in this order.
        purpose: what the patch set does there.
        hooks: what stands there, the innermost first; none where the patch set only calls or extends it.
    """

    target: str
    parameters: tuple[str, ...]
    purpose: str
    hooks: tuple[Hook, ...] = ()


def _before(function: str, *, always: bool = False) -> Hook:
    return Hook("BEFORE", function, always)


def _after(function: str, *, always: bool = False) -> Hook:
    return Hook("AFTER", function, always)


def _around(function: str, *, always: bool = False) -> Hook:
    return Hook("AROUND", function, always)


_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_OPENAI = "sglang.srt.entrypoints.openai"
_GRPC = "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_RESULTS_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_LOGPROBS = "sglang.srt.layers.logprob_processor"
_PIPELINE = "sglang.srt.managers.scheduler_pp_mixin"
_ANSWERED_FROM = ("self", "adapted_request", "request", "raw_request")

SERVED = (
    Seam(
        _REQUEST,
        ("text", "input_ids"),
        "the request gains top_logprobs_p, top_logprobs_source and return_logprobs_in_base64",
    ),
    Seam(
        f"{_REQUEST}.normalize_batch_and_arguments",
        ("self",),
        "thresholds are checked, spread over the batch and handed to the scheduler",
        (_around("request.normalize"),),
    ),
    Seam(
        f"{_REQUEST}.__getitem__",
        ("self", "i"),
        "the parts of a batch keep their threshold",
        (_after("request.get_item"),),
    ),
    Seam(
        f"{_SCHEDULER}._add_request_to_queue",
        ("self", "req"),
        "a threshold that came past the checks ends its request",
        (_before("admission.check_request", always=True),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        ("self", "error_msg"),
        "a request is refused in the scheduler",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT",
        ("message", "status_code", "err_type"),
        "a request whose sets grow beyond the budget ends with an error",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        "a forward pass learns its rows' thresholds",
        (_after("rows.note_rows"),),
    ),
    Seam(
        f"{_RUNNER}.sample",
        ("self", "logits_output", "forward_batch"),
        "the sampled rows' sets join the forward pass's output",
        (_around("sampler.sample"),),
    ),
    Seam(
        f"{_RUNNER}.compute_logprobs_only",
        ("self", "logits_output", "forward_batch"),
        "a pass that only scores prompts hands its sets on",
        (_around("prefill.compute_logprobs_only"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
        ("self",),
        "a prompt that is scored again after a retraction is not counted twice",
        (_after("prefill.forget_rows"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_batch_output",
        ("self", "recv_obj"),
        "the sets arrive from the scheduler",
        (_before("tokenizer_manager.receive_entries"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.add_logprob_to_meta_info",
        ("self", "meta_info", "state", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        "the sets are written into meta_info",
        (_after("tokenizer_manager.write_meta_info"), _after("resumed.note_in_meta_info")),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._coalesce_streaming_chunks",
        ("self", "out_list", "rid"),
        "streamed chunks that SGLang merges keep all their sets",
        (_after("tokenizer_manager.merge_chunks"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_abort_req",
        ("self", "recv_obj"),
        "the last chunk of a request that is aborted while it waits fits its sets",
        (_around("tokenizer_manager.write_last_chunk"),),
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        ("meta_info", "last_output_offset"),
        "which fields of a chunk hold one entry for each token",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.generate_request",
        ("self", "obj", "request"),
        "the fields of a call in process join its request; the sets for OpenAI's form are listened for",
        (
            _before("in_process.hand_over"),
            _around("openai_api.listen"),
        ),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.abort_request",
        ("self", "rid"),
        "a call whose sets do not fit is ended",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.__init__",
        ("self", "server_args"),
        "modes in which the sets cannot be exact refuse the request; routes without sets are guarded",
        (
            _after("mode.note_server_args", always=True),
            _after("model.note_model"),
            _after("disaggregation.note_server_args"),
        ),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.get_internal_state",
        ("self",),
        "the schedulers report whether they are patched",
        (_around("server_info.note_scheduler_states", always=True),),
    ),
    Seam(
        f"{_SCHEDULER}.get_internal_state",
        ("self", "recv_req"),
        "a scheduler reports whether it is patched",
        (_after("server_info.report_state", always=True),),
    ),
)
"""What every release has."""

IN_PROCESS = (
    Seam(
        f"{_ENGINE}.generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "an engine in process takes the fields as keywords",
        (_around("in_process.generate"),),
    ),
    Seam(
        f"{_ENGINE}.async_generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "so does its other method",
        (_around("in_process.async_generate"),),
    ),
)
"""`sglang.Engine` in one's own process."""

OPENAI = (
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._handle_non_streaming_request",
        _ANSWERED_FROM,
        "/v1/completions passes the fields on and answers with the sets",
        (_around("openai_api.add_to_answer"),),
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._generate_completion_stream",
        _ANSWERED_FROM,
        "so do its streams",
        (_around("openai_api.add_to_stream"),),
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._handle_non_streaming_request",
        _ANSWERED_FROM,
        "/v1/chat/completions passes the fields on and answers with the sets",
        (_around("openai_api.add_to_answer"),),
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._generate_chat_stream",
        _ANSWERED_FROM,
        "so do its streams",
        (_around("openai_api.add_to_stream"),),
    ),
)
"""The routes in OpenAI's form."""

RESUMED = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        ("self", "new_accepted_len"),
        "the token that was drawn when an abort came may end the answer by itself",
        (_around("resumed.finish_or_abort"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.tail_str",
        ("self", "new_accepted_len"),
        "stop strings are found across the cut of an answer that is resumed",
        (_around("resumed.tail_str"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.init_incremental_detokenize",
        ("self",),
        "so is its text made",
        (_around("resumed.begin_text"),),
    ),
    Seam(
        f"{_SCHEDULER}.send_abort_output",
        ("self", "abort_req", "req"),
        "a request that is aborted while it waits is sent with all of its tokens",
        (_around("resumed.send_what_is_there"),),
    ),
)
"""Answers that go on with what another request began: 0.5.23."""

GRPC = (
    Seam(
        f"{_GRPC}.submit_request",
        ("self", "req_dict"),
        "gRPC, which cannot carry candidate sets, refuses the request",
        (_before("routes.refuse_grpc", always=True),),
    ),
    Seam(
        f"{_GRPC}._submit_openai",
        ("self", "serving_key", "streaming", "json_body"),
        "so do its OpenAI calls",
        (_before("routes.refuse_grpc_openai", always=True),),
    ),
)
"""SGLang's gRPC server, from 0.5.14 on."""

CONTRACT = (
    Seam(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        ("body",),
        "bad input is answered with HTTP 400 before a stream begins",
        (_after("request.check_body", always=True),),
    ),
    Seam(
        "sglang.srt.utils.common.build_server_info",
        ("server_args", "scheduler_info"),
        "GET /server_info tells whether the patch set holds",
        (_after("server_info.add_status", always=True),),
    ),
)
"""A status before a stream begins, and a place in GET /server_info, from 0.5.22 on."""

AUXILIARY_OUTPUT = (
    Seam(
        f"{_PIPELINE}.add_auxiliary_output_to_pp_tensors",
        ("tensors", "output"),
        "the sets leave the last pipeline stage",
        (_around("pipeline.add_to_stage_output"),),
    ),
    Seam(
        f"{_PIPELINE}.pop_auxiliary_output_from_pp_tensors",
        ("tensors", "observer"),
        "the sets arrive in the first pipeline stage",
        (_around("pipeline.take_from_stage_output"),),
    ),
)
"""What a pass took is brought to the host, committed, and handed from stage to stage by SGLang: from 0.5.19
on."""

COMPOSED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.append_auxiliary_output",
        ("current", "output"),
        "the sets travel to the host with SGLang's own copy",
    ),
    Seam(
        "sglang.srt.managers.auxiliary_output.CommittedTokens",
        ("output_index", "token_ids"),
        "SGLang says which tokens became visible",
    ),
)
"""Several auxiliary outputs of one pass, from 0.5.20 on."""

DISAGGREGATION = (
    Seam(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        ("self", "decode_req"),
        "a decode server learns that the first token's set is on the prefill server",
        (_after("disaggregation.note_first_token"),),
    ),
    Seam(
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
        ("self",),
        "a prefill server is asked for it beside the KV cache",
        (_after("disaggregation.add_route"),),
    ),
    Seam(
        "sglang.srt.utils.network.NetworkAddress",
        ("host", "port"),
        "where the prefill server is asked",
    ),
)
"""Servers that only prefill or only decode."""

WEIGHT_VERSIONS = (
    Seam(
        f"{_SCHEDULER}.record_weight_version_change",
        ("self", "new_version"),
        "the name of the weights in force changes between two passes",
    ),
    Seam(
        "sglang.srt.runtime_context.get_serving",
        (),
        "where that name stands",
    ),
)
"""The scheduler knows the name of its weights, from 0.5.19 on."""

SAMPLER_SOURCE = (
    Seam(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        "the sampler's weights after its filters are captured, as SGLang does for its own mask",
        (_around("support.sample_from_probs"),),
    ),
    Seam(
        "sglang.srt.runtime_context.get_exec",
        (),
        "which backend samples",
    ),
)
"""The sampler hands out its weights, from 0.5.20 on."""

HIGHEST = (
    Seam(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        ("probs", "top_ks", "sampling_seed", "return_filtered_probs", "max_top_k"),
        "and no more of a row is sorted for that than top_k keeps",
        (_around("support.sample_of_the_highest"),),
    ),
)
"""The torch sampler ranks no more of a row than top_k keeps, from 0.5.22 on."""

LOGPROB_PROCESSORS = (
    Seam(
        f"{_LOGPROBS}.OutputLogprobProcessor.compute_logprobs",
        ("self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids"),
        "the sets are taken from the log-probs that SGLang reports",
        (_around("sampler.compute_logprobs"),),
    ),
    Seam(
        f"{_LOGPROBS}.InputLogprobProcessor.forward",
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
        (_around("prefill.forward"),),
    ),
)
"""Log-probs have processors of their own, from 0.5.16 on."""

NORMALIZER = (
    Seam(
        f"{_LOGPROBS}.compute_row_log_normalizer",
        ("logits",),
        "prompt log-probs are computed as SGLang computes them",
    ),
)
"""A prompt's log-probs without the whole softmax, from 0.5.18 on."""

SCORED_ON_HOST = (
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        (
            "extend_logprob_pruned_lens_cpu",
            "top_logprobs_nums",
            "extend_input_logprob_token_ids_gpu",
            "input_logprob_indices_cpu",
        ),
        "which rows of a pass score which prompt tokens",
    ),
)
"""Which rows of a pass are scored is known on the host, from 0.5.21 on."""

ONE_RESPONSE = (
    Seam(
        f"{_TOKENIZER_MANAGER}._stream_one_response",
        ("self", "obj", "state", "request"),
        "the sets are written into a chunk when it is sent",
        (_around("tokenizer_manager.write_sets"),),
    ),
)
"""What sends an answer is given its state, from 0.5.19 on."""

SOME_STATUSES = (
    Seam(
        f"{_TOKENIZER_MANAGER}._stream_one_response",
        ("self", "obj", "state", "request"),
        "an answer that ends with an error has its status",
        (_after("tokenizer_manager.answer_with_status"),),
    ),
)
"""Few errors have a status of their own, before 0.5.23."""

STREAMER = (
    Seam(
        f"{_STREAMER}.stream_output",
        ("self", "reqs", "return_logprob"),
        "sets that were sent are let go of",
        (_after("sampler.let_go_of_what_was_sent"),),
    ),
)
"""What the scheduler sends goes through an object of its own, from 0.5.13 on."""

DETOKENIZER = (
    Seam(
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        ("self", "recv_obj"),
        "the detokenizer gives back what large sets took on their way",
        (_after("heap.trim_after_batch"),),
    ),
)
"""The detokenizer loads plugins, from 0.5.22 on."""

PROMPT_ROWS = (
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        ("extend_logprob_pruned_lens_cpu", "top_logprobs_nums", "extend_input_logprob_token_ids_gpu"),
        "which rows of a pass score which prompt tokens",
    ),
)
"""The same on the device alone, before 0.5.21."""

COPIED_BY_US = (
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        ("self", "return_logprob"),
        "the sets travel to the host with SGLang's own copy",
        (_before("lifecycle.copy_to_host"),),
    ),
)
"""Before auxiliary outputs."""


def _committed_by_us(results: str, streamer: str) -> tuple[Seam, ...]:
    return (
        Seam(
            f"{results}.process_batch_result_prefill",
            ("self", "batch", "result"),
            "which tokens became visible in a step",
            (_around("lifecycle.process"),),
        ),
        Seam(
            f"{results}.process_batch_result_decode",
            ("self", "batch", "result"),
            "so in a decoding step",
            (_around("lifecycle.process"),),
        ),
        Seam(
            f"{streamer}.stream_output",
            ("self", "reqs", "return_logprob"),
            "the sets join their requests; those that were sent are let go of",
            (_before("lifecycle.commit"), _after("sampler.let_go_of_what_was_sent")),
        ),
        Seam(
            "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
            ".process_batch_result_disagg_prefill",
            ("self", "batch", "result"),
            "so where the first token is drawn for another server",
            (_around("lifecycle.process_on_prefill_server"),),
        ),
    )


COMMITTED_BY_US = _committed_by_us(_RESULTS, _STREAMER)
"""Before auxiliary outputs, 0.5.13 to 0.5.18."""

COMMITTED_IN_MIXIN = _committed_by_us(_RESULTS_MIXIN, _RESULTS_MIXIN)
"""The same where the scheduler does it by itself, in 0.5.12."""

SAMPLER_LOGPROBS = (
    Seam(
        "sglang.srt.layers.sampler.Sampler._attach_logprobs_to_output",
        (
            "self",
            "logits_output",
            "logprobs",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "sampling_info",
            "batch_next_token_ids",
        ),
        "the sets are taken from the log-probs that SGLang reports",
        (_around("sampler.attach_logprobs"),),
    ),
    Seam(
        f"{_LOGITS}.process_input_logprobs",
        ("self", "input_logits", "logits_metadata"),
        "the prompt positions' sets are taken from the logits that SGLang scores the prompt with",
        (_around("prefill.process_whole"),),
    ),
    Seam(
        f"{_LOGITS}.process_input_logprobs_by_chunk",
        (
            "self",
            "pruned_states",
            "sample_indices",
            "input_logprob_indices",
            "token_to_seq_idx",
            "lm_head",
            "logits_metadata",
        ),
        "so where they are made piece by piece",
        (_around("prefill.process_by_chunk"),),
    ),
    Seam(
        f"{_LOGITS}._get_logits",
        ("self",),
        "which pieces those are",
        (_after("prefill.hear_logits"),),
    ),
)
"""Log-probs before they had processors, up to 0.5.15.post1."""

WAITING = (
    Seam(
        f"{_TOKENIZER_MANAGER}._wait_one_response",
        ("self", "obj", "request"),
        "the sets are written into a chunk when it is sent",
        (_around("tokenizer_manager.write_sets_of"),),
    ),
)
"""What sends an answer looks its state up, before 0.5.19."""

PROMPT_IDS = (
    Seam(
        f"{_REQUEST}.__getitem__",
        ("self", "i"),
        "the parts of a batch keep return_prompt_token_ids",
        (_after("prompt_ids.get_item"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._send_one_request",
        ("self", "tokenized_obj"),
        "a prompt's token ids are kept for its answer",
        (_before("prompt_ids.note"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._send_batch_request",
        ("self", "tokenized_objs"),
        "so are those of prompts that are sent together",
        (_before("prompt_ids.note_batch"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._wait_one_response",
        ("self", "obj", "request"),
        "a prompt's token ids are written beside its answer",
        (_after("prompt_ids.write"),),
    ),
)
"""What text prompts were taken as, before 0.5.13."""

HTTP_ADDITIONS = (
    Seam(
        f"{_TOKENIZER_MANAGER}.__init__",
        ("self", "server_args"),
        "bad input is answered with HTTP 400; GET /server_info tells whether the patch set holds",
        (_after("http_additions.install", always=True),),
    ),
)
"""What the HTTP server has no function for, before 0.5.22."""
