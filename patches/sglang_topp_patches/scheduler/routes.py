"""Keep the routed experts of retracted requests, so that each row is from the weights that drew its token.

With `return_routed_experts`, SGLang answers `[rows, layers, top_k]` expert ids. Row i is the routing of the
sequence's position i, which scores the token at i + 1. SGLang stores one row per KV slot, and reads a
request's rows when it finishes. A retracted request has lost its slots by then: SGLang prefills its prompt
and its tokens again, perhaps with newer weights, so it would answer how the new weights route tokens that the
old ones drew.

Prompt rows may come from the prefix cache, so a request for routes has a cache namespace for the current
weights, as a request with a scored prompt has (`requests.SchedulerProcess.choose_namespace`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_topp_patches.hooks import Seam, after, around
from sglang_topp_patches.scheduler.requests import refuse, returns_routes

CALLED = (
    Seam(
        "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer",
        "Find the buffer with the experts of each KV slot.",
    ),
    Seam(
        "sglang.srt.state_capturer.base.BaseTopkCapturer.get_topk",
        "Read the rows of a request.",
        ("req_pool_idx", "seqlen", "req_to_token_pool", "start_len"),
    ),
)
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


@around("sglang.srt.managers.schedule_batch.release_req", since="0.5.13")
def keep_routes(original: Callable[..., Any], *, req: Any, req_to_token_pool: Any, **kwargs: Any) -> Any:
    """Keep the rows that belong to the tokens of a request, before SGLang frees its KV slots.

    The row of the last token's position belongs to the next token, which the second prefill draws.
    """
    rows = None
    if returns_routes(req) and req.output_ids:
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        length = len(req.origin_input_ids) + len(req.output_ids)
        holder = req if hasattr(req, "req_pool_idx") else req.kv
        rows = get_global_experts_capturer().get_topk(
            holder.req_pool_idx, length, req_to_token_pool, req.routed_experts_start_len
        )
        rows = _joined(req.routed_experts, rows)
    result = original(req=req, req_to_token_pool=req_to_token_pool, **kwargs)
    if req.output_ids:  # SGLang drops the tokens of a prompt that consists of embeddings
        req.routed_experts = rows
    return result


@around(f"{_PROCESSOR}._maybe_collect_routed_experts", since="0.5.13")
def collect_routes(original: Callable[..., None], self: Any, req: Any) -> None:
    """Put the kept rows in place of those of the second prefill."""
    kept = req.routed_experts
    original(self, req)
    if returns_routes(req):
        rows = req.routed_experts = _joined(kept, req.routed_experts)
        if rows.numel() and not rows.any():
            refuse(req, "SGLang recorded no routed experts; does --moe-runner-backend route inside a kernel?")


@after("sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", since="0.5.13", until="0.5.18")
def copy_routes(output: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the rows of a pass, whose buffer the next pass overwrites.

    SGLang may read them only then: on a GPU from 0.5.15 on, and on a CPU. From 0.5.18 on, it copies them.
    """
    if output is not None:
        output.out_cache_loc, output.topk = output.out_cache_loc.clone(), output.topk.clone()


def _joined(kept: Tensor | None, rows: Tensor) -> Tensor:
    return rows if kept is None else torch.cat([kept, rows[len(kept) :]])
