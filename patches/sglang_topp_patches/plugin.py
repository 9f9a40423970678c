"""The entry point of the group `sglang.srt.plugins`: check the seams, then hook them.

SGLang calls `register` in the launcher and in every process that it starts, before they serve. Where a
seam does not hold, only the hooks that refuse and report are installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_topp_patches import (
    admission,
    disaggregation,
    heap,
    http_app,
    in_process,
    mode,
    model,
    openai_api,
    pipeline,
    prefill,
    request,
    resumed,
    routes,
    rows,
    sampler,
    server_info,
    support,
    tokenizer_manager,
)
from sglang_topp_patches.seams import check_seams

__all__ = ["register"]

_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_DISAGGREGATION = "sglang.srt.disaggregation"
_PIPELINE = "sglang.srt.managers.scheduler_pp_mixin"
_GRPC = "sglang.srt.entrypoints.grpc_bridge.RuntimeHandle"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"

# target, kind of hook, hook
_REFUSE_AND_REPORT: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("sglang.srt.entrypoints.api_contract.generate_contract_error", "AFTER", request.check_body),
    (f"{_TOKENIZER_MANAGER}.__init__", "AFTER", mode.note_server_args),
    ("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "BEFORE", admission.check_request),
    (f"{_GRPC}.submit_request", "BEFORE", routes.refuse_grpc),
    (f"{_GRPC}._submit_openai", "BEFORE", routes.refuse_grpc_openai),
    (f"{_TOKENIZER_MANAGER}.get_internal_state", "AROUND", server_info.note_scheduler_states),
    ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "AFTER", server_info.report_state),
    ("sglang.srt.utils.common.build_server_info", "AFTER", server_info.add_status),
)
_SERVE: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{_REQUEST}.normalize_batch_and_arguments", "AROUND", request.normalize),
    (f"{_REQUEST}.__getitem__", "AFTER", request.get_item),
    ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", "AFTER", rows.note_rows),
    ("sglang.srt.model_executor.model_runner.ModelRunner.sample", "AROUND", sampler.sample),
    (
        "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        "AROUND",
        sampler.compute_logprobs,
    ),
    ("sglang.srt.layers.sampler.Sampler._sample_from_probs", "AROUND", support.sample_from_probs),
    (
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "AROUND",
        support.sample_of_the_highest,
    ),
    (
        "sglang.srt.model_executor.model_runner.ModelRunner.compute_logprobs_only",
        "AROUND",
        prefill.compute_logprobs_only,
    ),
    ("sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward", "AROUND", prefill.forward),
    (f"{_STREAMER}.is_request_level_customized_info_key", "AFTER", prefill.is_sent_once),
    (f"{_STREAMER}.stream_output", "AFTER", sampler.let_go_of_what_was_sent),
    (f"{_PIPELINE}.add_auxiliary_output_to_pp_tensors", "AROUND", pipeline.add_to_stage_output),
    (f"{_PIPELINE}.pop_auxiliary_output_from_pp_tensors", "AROUND", pipeline.take_from_stage_output),
    (f"{_REQ}.reset_for_retract", "AFTER", prefill.forget_rows),
    (f"{_REQ}.update_finish_state", "AROUND", resumed.finish_or_abort),
    (f"{_REQ}.tail_str", "AROUND", resumed.tail_str),
    (f"{_REQ}.init_incremental_detokenize", "AROUND", resumed.begin_text),
    ("sglang.srt.managers.scheduler.Scheduler.send_abort_output", "AROUND", resumed.send_what_is_there),
    (
        f"{_DISAGGREGATION}.decode.DecodeTransferQueue._commit_transfer_to_req",
        "AFTER",
        disaggregation.note_first_token,
    ),
    (
        f"{_DISAGGREGATION}.common.conn.CommonKVBootstrapServer._setup_routes",
        "AFTER",
        disaggregation.add_route,
    ),
    (f"{_TOKENIZER_MANAGER}.__init__", "AFTER", model.note_model),
    (f"{_TOKENIZER_MANAGER}.__init__", "AFTER", disaggregation.note_server_args),
    (
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        "AFTER",
        heap.trim_after_batch,
    ),
    (f"{_TOKENIZER_MANAGER}._handle_batch_output", "BEFORE", tokenizer_manager.receive_entries),
    (f"{_TOKENIZER_MANAGER}.add_logprob_to_meta_info", "AFTER", tokenizer_manager.write_meta_info),
    (f"{_TOKENIZER_MANAGER}.add_logprob_to_meta_info", "AFTER", resumed.note_in_meta_info),
    (f"{_TOKENIZER_MANAGER}._coalesce_streaming_chunks", "AFTER", tokenizer_manager.merge_chunks),
    (f"{_TOKENIZER_MANAGER}._stream_one_response", "AROUND", tokenizer_manager.write_sets),
    (f"{_TOKENIZER_MANAGER}._handle_abort_req", "AROUND", tokenizer_manager.repeat_nothing),
    (f"{_ENGINE}.generate", "AROUND", in_process.generate),
    (f"{_ENGINE}.async_generate", "AROUND", in_process.async_generate),
    (f"{_TOKENIZER_MANAGER}.generate_request", "BEFORE", in_process.hand_over),
    (f"{_TOKENIZER_MANAGER}.generate_request", "AROUND", openai_api.listen),
    (f"{_COMPLETION}._handle_non_streaming_request", "AROUND", openai_api.add_to_answer),
    (f"{_COMPLETION}._generate_completion_stream", "AROUND", openai_api.add_to_stream),
    (f"{_CHAT}._handle_non_streaming_request", "AROUND", openai_api.add_to_answer),
    (f"{_CHAT}._generate_chat_stream", "AROUND", openai_api.add_to_stream),
)


def register() -> None:
    """Check every seam and register the hooks; SGLang puts them in place when this returns."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    http_app.install()
    found = check_seams()
    hooks = _REFUSE_AND_REPORT
    if found.active:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request.extend_request_class(GenerateReqInput)
        hooks += _SERVE
    for problem in found.problems:
        logging.getLogger(__name__).error("sglang-topp refuses candidate sets: %s", problem)
    for target, kind, hook in hooks:
        HookRegistry.register(target, hook, HookType[kind])
