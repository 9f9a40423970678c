"""List the SGLang functions and classes that the hooks depend on, in groups by feature and release.

A seam is an SGLang function or class that the patch set wraps, calls, or extends. `seam_check` verifies at
startup that each seam exists and has the parameters that the hooks rely on. For each SGLang release,
`compat.releases` selects the groups of seams that exist in the release.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hook", "Seam"]


@dataclass(frozen=True)
class Hook:
    """A function of this package that wraps an SGLang function.

    Attributes:
        kind: the hook's kind in SGLang's `HookType`, which is BEFORE, AFTER, or AROUND.
        function: the hook's path in this package, as `module.function`.
        always: whether the plugin installs the hook even in a process that serves no candidate sets. A hook
            that is always installed helps to refuse requests or to report problems.
        state: the attribute of `plugin.ProcessState`, the patch set's state in one process, that the hook
            gets as its first argument; empty if the hook gets no state.
    """

    kind: str
    function: str
    always: bool = False
    state: str = ""


@dataclass(frozen=True)
class Seam:
    """One SGLang function or class that the patch set depends on.

    Attributes:
        target: the dotted path, `module.attribute` or `module.Class.method`.
        parameters: parameter names that the signature must have, in this order.
        purpose: what the patch set does with the function or class.
        hooks: the hooks on the target, the innermost first. The tuple is empty if the patch set only calls or
            extends the target.
    """

    target: str
    parameters: tuple[str, ...]
    purpose: str
    hooks: tuple[Hook, ...] = ()


def _before(function: str, *, always: bool = False, state: str = "") -> Hook:
    return Hook("BEFORE", function, always, state)


def _after(function: str, *, always: bool = False, state: str = "") -> Hook:
    return Hook("AFTER", function, always, state)


def _around(function: str, *, always: bool = False, state: str = "") -> Hook:
    return Hook("AROUND", function, always, state)


_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_OPENAI = "sglang.srt.entrypoints.openai"
_MIDDLEWARE = "fastapi.applications.FastAPI.build_middleware_stack"
_GRPC = "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_RESULTS_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_LOGPROBS = "sglang.srt.layers.logprob_processor"
_PIPELINE = "sglang.srt.managers.scheduler_pp_mixin"
_ANSWERED_FROM = ("self", "adapted_request", "request", "raw_request")

COMMON = (
    Seam(
        f"{_REQUEST}.normalize_batch_and_arguments",
        ("self",),
        "attaches what each prompt wants",
        (_around("http.request_fields.normalize", state="http"),),
    ),
    Seam(
        f"{_REQUEST}.__getitem__",
        ("self", "i"),
        "attaches to the parts of a batch what they want",
        (_after("http.request_fields.get_item"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._create_tokenized_object",
        ("self", "obj", "input_text", "input_ids"),
        "sends what a request wants to the scheduler, after the server's defaults are merged",
        (_after("http.request_fields.send_to_scheduler"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        ("self", "rid", "origin_input_text", "origin_input_ids", "sampling_params"),
        "receives what a request wants in the scheduler",
        (_around("scheduler.refuse_unchecked_requests.receive", always=True),),
    ),
    Seam(
        f"{_SCHEDULER}._add_request_to_queue",
        ("self", "req"),
        "refuses a request that bypassed the HTTP checks",
        (_before("scheduler.refuse_unchecked_requests.check_request", always=True, state="scheduler"),),
    ),
    Seam(
        f"{_SCHEDULER}.abort_request",
        ("self", "recv_req"),
        "stops counting the sets of requests that are aborted while they wait",
        (_before("scheduler.request_budget.close_accounts_of_aborted"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        ("self", "error_msg"),
        "refuses a request in the scheduler",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT",
        ("message", "status_code", "err_type"),
        "ends a request with an error",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        "notes which rows of a forward pass ask for sets",
        (_after("scheduler.requested_rows.note_requested_rows", state="scheduler"),),
    ),
    Seam(
        f"{_RUNNER}.sample",
        ("self", "logits_output", "forward_batch"),
        "attaches the generated tokens' sets to the pass",
        (_around("scheduler.extract_generated_sets.sample"),),
    ),
    Seam(
        f"{_RUNNER}.compute_logprobs_only",
        ("self", "logits_output", "forward_batch"),
        "attaches the sets of a pass that only scores prompts",
        (_around("scheduler.extract_prompt_sets.compute_logprobs_only"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
        ("self",),
        "counts a prompt once that is scored again after a retraction",
        (_after("scheduler.extract_prompt_sets.forget_rows"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        ("self", "tree_cache"),
        "keeps a scored prompt from sharing KV with other weights",
        (_before("scheduler.prefix_cache_per_weights.PrefixCache.choose_namespace", state="prefix_cache"),),
    ),
    Seam(
        f"{_SCHEDULER}.flush_cache",
        ("self",),
        "learns that the prefix cache holds no KV of older weights",
        (_after("scheduler.prefix_cache_per_weights.PrefixCache.note_flush", state="prefix_cache"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_batch_output",
        ("self", "recv_obj"),
        "receives the sets from the scheduler",
        (_before("http.sets_in_meta_info.receive_entries"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.add_logprob_to_meta_info",
        ("self", "meta_info", "state", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        "notes which positions a chunk shows",
        (
            _after("http.sets_in_meta_info.write_meta_info", state="http"),
            _after("http.resume.note_in_meta_info"),
        ),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._coalesce_streaming_chunks",
        ("self", "out_list", "rid"),
        "merges the sets of streamed chunks that SGLang merges",
        (_after("http.sets_in_meta_info.merge_chunks"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._handle_abort_req",
        ("self", "recv_obj"),
        "writes all tokens into the last chunk of a request that is aborted while it waits",
        (_around("http.sets_in_meta_info.write_last_chunk"),),
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        ("meta_info", "last_output_offset"),
        "knows which fields of a chunk hold one entry per token",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.generate_request",
        ("self", "obj", "request"),
        "adds an offline engine's fields to its request; collects the sets of OpenAI routes",
        (
            _before("http.offline_engine.set_fields"),
            _around("http.openai.collect_sets"),
        ),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.abort_request",
        ("self", "rid"),
        "aborts a request that can only end as an error",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.__init__",
        ("self", "server_args"),
        "learns the server mode and the model's limits",
        (
            _after("http.process_state.note_server_args", always=True, state="http"),
            _after("http.process_state.note_model", state="http"),
        ),
    ),
    Seam(
        _MIDDLEWARE,
        ("self",),
        "guards the routes",
        (_around("http.route_policy.guard", always=True, state="http"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}.get_internal_state",
        ("self",),
        "collects whether the schedulers are patched",
        (_around("http.server_info.note_scheduler_states", always=True, state="http"),),
    ),
    Seam(
        f"{_SCHEDULER}.get_internal_state",
        ("self", "recv_req"),
        "reports whether a scheduler is patched",
        (_after("http.server_info.report_state", always=True, state="scheduler"),),
    ),
)
"""The SGLang functions and classes that the patch set uses with every release."""

IN_PROCESS = (
    Seam(
        f"{_ENGINE}.generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "accepts the fields as keyword arguments of an offline engine",
        (_around("http.offline_engine.generate"),),
    ),
    Seam(
        f"{_ENGINE}.async_generate",
        ("self", "prompt", "sampling_params", "input_ids"),
        "accepts the fields as keyword arguments of an offline engine",
        (_around("http.offline_engine.async_generate"),),
    ),
)
"""The methods of the offline engine, which is `sglang.Engine` in the caller's process."""

OPENAI = (
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._handle_non_streaming_request",
        _ANSWERED_FROM,
        "adds the sets to an answer of /v1/completions",
        (_around("http.openai.add_to_answer"),),
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._generate_completion_stream",
        _ANSWERED_FROM,
        "adds the sets to a stream of /v1/completions",
        (_around("http.openai.add_to_stream"),),
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._handle_non_streaming_request",
        _ANSWERED_FROM,
        "adds the sets to an answer of /v1/chat/completions",
        (_around("http.openai.add_to_answer"),),
    ),
    Seam(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._generate_chat_stream",
        _ANSWERED_FROM,
        "adds the sets to a stream of /v1/chat/completions",
        (_around("http.openai.add_to_stream"),),
    ),
)
"""The methods behind the completion and chat routes of SGLang's OpenAI API."""

RESUME = (
    Seam(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        ("self", "new_accepted_len"),
        "finishes an aborted answer if its last token ends it anyway",
        (_around("http.resume.finish_or_abort"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.tail_str",
        ("self", "new_accepted_len"),
        "finds stop strings across the cut of a resumed answer",
        (_around("http.resume.tail_str"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix",
        ("self",),
        "holds back text that may begin a stop string whose next character is incomplete",
        (_around("http.resume.hold_back_stop_string"),),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.Req.init_incremental_detokenize",
        ("self",),
        "decodes the text of a resumed answer from before the cut",
        (_around("http.resume.begin_text"),),
    ),
    Seam(
        f"{_SCHEDULER}.send_abort_output",
        ("self", "abort_req", "req"),
        "sends all tokens of a request that is aborted while it waits",
        (_around("http.resume.send_all_tokens"),),
    ),
    Seam(
        f"{_SCHEDULER}.collect_inflight_reqs",
        ("self",),
        "finds the running requests that are aborted during an in_place pause",
    ),
    Seam(
        f"{_SCHEDULER}.abort_request",
        ("self", "recv_req"),
        "sends the tokens of requests that are aborted during an in_place pause",
        (_after("http.resume.send_while_paused"),),
    ),
)
"""The SGLang functions that the request field `resumed_tokens` depends on, in SGLang 0.5.23 and later."""


def _verification(logprobs: str) -> tuple[Seam, ...]:
    return (
        Seam(
            "sglang.srt.speculative.eagle_utils.eagle_sample",
            ("verify_input", "batch", "logits_output"),
            "keeps what speculative verification draws, and from what",
            (_around("scheduler.speculative_verification.sample"),),
        ),
        Seam(
            logprobs,
            ("batch", "logits_output", "predict", "accept_index"),
            "takes the sets of accepted tokens from the logits that SGLang reports log-probs of",
            (_around("scheduler.speculative_verification.compute_logprobs", state="scheduler"),),
        ),
    )


VERIFICATION = _verification(f"{_LOGPROBS}.compute_spec_logprobs")
"""The functions that verify the tokens of speculative decoding, in SGLang 0.5.18 and later."""

VERIFICATION_IN_0_5_16 = _verification(f"{_LOGPROBS}.compute_spec_v2_logprobs")
"""The functions that verify the tokens of speculative decoding, in SGLang 0.5.16 and 0.5.17."""

VERIFICATION_BEFORE_0_5_16 = _verification("sglang.srt.layers.utils.logprob.compute_spec_v2_logprobs")
"""The functions that verify the tokens of speculative decoding, in SGLang up to 0.5.15.post1."""

GRPC = (
    Seam(
        f"{_GRPC}.submit_request",
        ("self", "req_dict"),
        "refuses the fields over gRPC, whose messages cannot carry sets",
        (_before("http.route_policy.refuse_grpc", always=True),),
    ),
    Seam(
        f"{_GRPC}._submit_openai",
        ("self", "serving_key", "streaming", "json_body"),
        "refuses the fields of OpenAI requests over gRPC",
        (_before("http.route_policy.refuse_grpc_openai", always=True),),
    ),
)
"""The methods of SGLang's gRPC server, which exists since SGLang 0.5.14."""

HTTP_CONTRACT = (
    Seam(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        ("body",),
        "answers bad input with HTTP 400 before a stream begins",
        (_after("http.request_fields.check_body", always=True, state="http"),),
    ),
    Seam(
        "sglang.srt.utils.common.build_server_info",
        ("server_args", "scheduler_info"),
        "adds the patch set's status to GET /server_info",
        (_after("http.server_info.add_status", always=True, state="http"),),
    ),
)
"""The functions that check request bodies or answer `GET /server_info`, in SGLang 0.5.22 and later."""

AUXILIARY_OUTPUT = (
    Seam(
        f"{_PIPELINE}.add_auxiliary_output_to_pp_tensors",
        ("tensors", "output"),
        "sends the sets from the last pipeline stage",
        (_around("scheduler.pipeline_parallel.add_to_stage_output", state="in_flight"),),
    ),
    Seam(
        f"{_PIPELINE}.pop_auxiliary_output_from_pp_tensors",
        ("tensors", "observer"),
        "receives the sets in the first pipeline stage",
        (_around("scheduler.pipeline_parallel.take_from_stage_output"),),
    ),
)
"""The functions that send auxiliary outputs between pipeline stages, in SGLang 0.5.19 and later.

An auxiliary output holds extra results of a forward pass, such as candidate sets."""

COMPOSED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.append_auxiliary_output",
        ("current", "output"),
        "copies the sets to the host with SGLang's own results",
    ),
    Seam(
        "sglang.srt.managers.auxiliary_output.CommittedTokens",
        ("output_index", "token_ids"),
        "knows which tokens became visible",
    ),
)
"""The function that combines auxiliary outputs, and the class that lists the tokens appended to a request.

SGLang 0.5.20 and later have this function and this class."""

DISAGGREGATION = (
    Seam(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        ("self", "decode_req"),
        "learns on a decode server that the prefill server has the first token's set",
        (_after("disaggregation.fetch_prefill_sets.note_first_token"),),
    ),
    Seam(
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
        ("self",),
        "answers for the first token's set on a prefill server",
        (_after("disaggregation.serve_prefill_sets.PrefillServer.add_route", state="prefill_server"),),
    ),
    Seam(
        "sglang.srt.utils.network.NetworkAddress",
        ("host", "port"),
        "builds the prefill server's address",
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._tokenize_one_request",
        ("self", "obj"),
        "waits on a prefill server until the decode server asks for the first token's set",
        (
            _around(
                "disaggregation.serve_prefill_sets.PrefillServer.await_decode_server", state="prefill_server"
            ),
        ),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._batch_tokenize_and_process",
        ("self", "batch_size", "obj"),
        "waits on a prefill server until the decode server asks for each prompt's set",
        (
            _around(
                "disaggregation.serve_prefill_sets.PrefillServer.await_decode_servers", state="prefill_server"
            ),
        ),
    ),
)
"""The SGLang functions of disaggregated serving, in which a server only prefills or only decodes."""


def _weight_pushes(updater: str, *functions: str) -> tuple[Seam, ...]:
    return tuple(
        Seam(
            f"{updater}.{function}",
            ("self", "recv_req"),
            "counts weight pushes",
            (_before("scheduler.prefix_cache_per_weights.PrefixCache.note_push", state="prefix_cache"),),
        )
        for function in functions
    )


_PUSHES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)

WEIGHT_PUSHES = _weight_pushes(_UPDATER, *_PUSHES)
"""The methods that receive pushed weights, in SGLang 0.5.13 and later."""

WEIGHT_PUSHES_IN_MIXIN = _weight_pushes(_UPDATER_MIXIN, *_PUSHES)
"""The methods that receive pushed weights in SGLang 0.5.12. The scheduler's mixin has these methods."""

WEIGHT_UPDATE_SESSIONS = _weight_pushes(_UPDATER, "begin_weight_update", "end_weight_update")
"""The methods `begin_weight_update` and `end_weight_update`, which exist since SGLang 0.5.21.

Between the calls of these two methods, other processes may write the weights directly (P2P or RDMA)."""

WEIGHT_VERSIONS = (
    Seam(
        f"{_SCHEDULER}.record_weight_version_change",
        ("self", "new_version"),
        "relies on a new weight version only between two passes",
    ),
    Seam(
        "sglang.srt.runtime_context.get_serving",
        (),
        "reads the weight version",
    ),
)
"""The functions that set and read the scheduler's weight version, in SGLang 0.5.19 and later."""

SAMPLER_SOURCE = (
    Seam(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        "captures the sampler's weights after its filters, as SGLang does for its own mask",
        (_around("scheduler.sampler_candidates.sample_from_probs"),),
    ),
    Seam(
        "sglang.srt.runtime_context.get_exec",
        (),
        "reads which backend samples",
    ),
)
"""The functions that tell the patch set from which tokens the sampler draws.

SGLang 0.5.20 and later can return the filtered probabilities, from which the sampler draws."""

TOP_K_RANKING = (
    Seam(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        ("probs", "top_ks", "sampling_seed", "return_filtered_probs", "max_top_k"),
        "ranks no more tokens of a row than top_k keeps, when the sampler returns its weights",
        (_around("scheduler.sampler_candidates.rank_only_top_k"),),
    ),
)
"""SGLang's torch sampler.

Since SGLang 0.5.22, this sampler can limit its sort to the `max_top_k` most likely tokens of each row."""

LOGPROB_PROCESSORS = (
    Seam(
        f"{_LOGPROBS}.OutputLogprobProcessor.compute_logprobs",
        ("self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids"),
        "takes the sets from the log-probs that SGLang reports",
        (_around("scheduler.extract_generated_sets.compute_logprobs"),),
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
        "takes the prompt's sets from the logits that SGLang scores the prompt with",
        (_around("scheduler.extract_prompt_sets.forward"),),
    ),
)
"""The methods that compute log-probs in SGLang 0.5.16 and later."""

NORMALIZER = (
    Seam(
        f"{_LOGPROBS}.compute_row_log_normalizer",
        ("logits",),
        "computes prompt log-probs as SGLang does",
    ),
)
"""`compute_row_log_normalizer`.

SGLang 0.5.18 and later may score prompts with this function instead of `log_softmax`."""

SCORED_ROWS_ON_HOST = (
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        (
            "extend_logprob_pruned_lens_cpu",
            "top_logprobs_nums",
            "extend_input_logprob_token_ids_gpu",
            "input_logprob_indices_cpu",
        ),
        "reads which rows of a pass score which prompt tokens",
    ),
)
"""`LogitsMetadata` since SGLang 0.5.21: the list of rows that score prompt tokens is on the host."""

SEND_WITH_STATE = (
    Seam(
        f"{_TOKENIZER_MANAGER}._stream_one_response",
        ("self", "obj", "state", "request"),
        "writes the sets into a chunk when it is sent",
        (_around("http.sets_in_meta_info.write_sets", state="http"),),
    ),
)
"""`TokenizerManager._stream_one_response`, which yields an answer's chunks in SGLang 0.5.19 and later.

SGLang passes the request's state, a `ReqState`, to `_stream_one_response`."""

FEW_STATUSES = (
    Seam(
        f"{_TOKENIZER_MANAGER}._stream_one_response",
        ("self", "obj", "state", "request"),
        "answers every error with its status",
        (_after("http.sets_in_meta_info.answer_with_status"),),
    ),
)
"""`_stream_one_response` in SGLang before 0.5.23: the method loses the HTTP status of some errors."""

STREAMER = (
    Seam(
        f"{_STREAMER}.stream_output",
        ("self", "reqs", "return_logprob"),
        "frees the sets that were sent",
        (_after("scheduler.extract_generated_sets.free_sent_entries"),),
    ),
)
"""`SchedulerOutputStreamer`, which sends the scheduler's output in SGLang 0.5.13 and later."""

DETOKENIZER = (
    Seam(
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        ("self", "recv_obj"),
        "returns freed memory to the OS after large sets",
        (_after("memory.detokenizer_malloc_trim.trim_after_batch", state="in_flight"),),
    ),
)
"""A method in the detokenizer process. In version 0.5.22 and later, SGLang loads plugins there too."""

SCORED_ROWS = (
    Seam(
        "sglang.srt.layers.logits_processor.LogitsMetadata",
        ("extend_logprob_pruned_lens_cpu", "top_logprobs_nums", "extend_input_logprob_token_ids_gpu"),
        "reads which rows of a pass score which prompt tokens",
    ),
)
"""`LogitsMetadata` before SGLang 0.5.21: the list of rows that score prompt tokens is on the device."""

COPY_TO_HOST = (
    Seam(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        ("self", "return_logprob"),
        "copies the sets to the host with SGLang's own results",
        (_before("scheduler.host_copy_before_0_5_19.copy_to_host"),),
    ),
)
"""The function that copies a forward pass's results to the host, in SGLang before 0.5.19."""


def _commit(results: str, streamer: str) -> tuple[Seam, ...]:
    return (
        Seam(
            f"{results}.process_batch_result_prefill",
            ("self", "batch", "result"),
            "commits the tokens that became visible in a step",
            (_around("scheduler.host_copy_before_0_5_19.process"),),
        ),
        Seam(
            f"{results}.process_batch_result_decode",
            ("self", "batch", "result"),
            "commits the tokens that became visible in a decoding step",
            (_around("scheduler.host_copy_before_0_5_19.process"),),
        ),
        Seam(
            f"{streamer}.stream_output",
            ("self", "reqs", "return_logprob"),
            "adds the sets to their requests; frees the sets that were sent",
            (
                _before("scheduler.host_copy_before_0_5_19.commit"),
                _after("scheduler.extract_generated_sets.free_sent_entries"),
            ),
        ),
        Seam(
            "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
            ".process_batch_result_disagg_prefill",
            ("self", "batch", "result"),
            "commits the first token that a prefill server draws",
            (_around("scheduler.host_copy_before_0_5_19.process_on_prefill_server"),),
        ),
    )


COMMIT = _commit(_RESULTS, _STREAMER)
"""The functions that append new tokens to requests and send the tokens, in SGLang 0.5.13 to 0.5.18."""

COMMIT_IN_MIXIN = _commit(_RESULTS_MIXIN, _RESULTS_MIXIN)
"""The functions that append new tokens to requests and send the tokens, in SGLang 0.5.12.

In SGLang 0.5.12, these functions belong to mixins of the scheduler."""

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
        "takes the sets from the log-probs that SGLang reports",
        (_around("scheduler.extract_generated_sets.attach_logprobs"),),
    ),
    Seam(
        f"{_LOGITS}.process_input_logprobs",
        ("self", "input_logits", "logits_metadata"),
        "takes the prompt's sets from the logits that SGLang scores the prompt with",
        (_around("scheduler.extract_prompt_sets.process_whole"),),
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
        "takes the prompt's sets where SGLang scores the prompt in chunks",
        (_around("scheduler.extract_prompt_sets.process_by_chunk"),),
    ),
    Seam(
        f"{_LOGITS}._get_logits",
        ("self",),
        "takes the sets of one chunk of a scored prompt",
        (_after("scheduler.extract_prompt_sets.observe_logits"),),
    ),
)
"""The sampler's and the logits processor's methods that compute log-probs, up to SGLang 0.5.15.post1."""

SEND_BY_LOOKUP = (
    Seam(
        f"{_TOKENIZER_MANAGER}._wait_one_response",
        ("self", "obj", "request"),
        "writes the sets into a chunk when it is sent",
        (_around("http.sets_in_meta_info.write_sets_of", state="http"),),
    ),
)
"""`TokenizerManager._wait_one_response`, which yields an answer's chunks in SGLang before 0.5.19.

`_wait_one_response` itself looks up the request's state, a `ReqState`."""

PROMPT_TOKEN_IDS = (
    Seam(
        f"{_TOKENIZER_MANAGER}._send_one_request",
        ("self", "tokenized_obj"),
        "keeps a prompt's token ids for its answer",
        (_before("http.prompt_token_ids_0_5_12.note"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._send_batch_request",
        ("self", "tokenized_objs"),
        "keeps the token ids of prompts that are sent together",
        (_before("http.prompt_token_ids_0_5_12.note_batch"),),
    ),
    Seam(
        f"{_TOKENIZER_MANAGER}._wait_one_response",
        ("self", "obj", "request"),
        "adds a prompt's token ids to its answer",
        (_after("http.prompt_token_ids_0_5_12.write"),),
    ),
)
"""The functions that the patch set wraps to return the token ids of text prompts.

SGLang before 0.5.13 does not return the token ids of text prompts."""

NO_HTTP_CONTRACT = (
    Seam(
        _MIDDLEWARE,
        ("self",),
        "answers bad input with HTTP 400; adds the patch set's status to GET /server_info",
        (_before("http.request_check_middleware_before_0_5_22.install", always=True, state="http"),),
    ),
)
"""The method whose hook installs the patch set's middleware, in SGLang before 0.5.22.

List this group first: its middleware then runs inside of `Guard`.
SGLang before 0.5.22 lacks the functions in `HTTP_CONTRACT`."""
