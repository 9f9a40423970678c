"""Extract the candidate sets of one forward pass in the scheduler, and add them to their requests.

1. `note_requested_rows` records which rows of a new `ForwardBatch` ask for sets.
2. `sample` wraps `ModelRunner.sample`, which draws the tokens and computes the log-probs that SGLang reports.
   While it runs, `sample_from_probs` records the tokens that the sampler could draw, and `compute_logprobs`
   extracts the sets from the log-probs of the whole vocabulary (`attach_logprobs` before SGLang 0.5.16).
   `sample` then attaches the sets to the output of the forward pass.
3. The sets are copied to the host together with SGLang's own results. SGLang then drops invalid tokens, such
   as tokens after a stop condition and tokens of a retracted request. `GeneratedSets.consume` runs
   afterwards, and adds the set of each remaining token to the token's request.

A request asks for one of two kinds of sets. With the field `top_logprobs_p`, a token is in the set if all
more probable tokens have a total probability below `top_logprobs_p`. With the field `top_logprobs_source` set
to `"sampler"`, the set consists of the tokens that the sampler could draw: those whose probability is above 0
after its filters. SGLang returns the filtered probabilities from the same call that draws the token. So each
set reflects the filters of the sampling backend, the order in which the filters run, and how the filters
treat ties. Every set also contains the sampled token.

With tensor parallelism, every rank computes the filtered probabilities, even if SGLang sends only one rank's
results to the client. If only that rank computed them, the ranks would call different sampling functions, and
could draw different tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp_patches.hooks import Seam, after, around, before
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler.requests import add_sets, is_refused
from sglang_topp_patches.scheduler.sets import (
    PassSets,
    Sets,
    extract,
    extract_support,
    is_staged,
    lowest_logprob,
    warm_up,
)
from sglang_topp_patches.set_buffer import PackedSet

CALLED = (
    Seam(
        "sglang.srt.managers.auxiliary_output.CommittedTokens",
        "Know which tokens became visible.",
        keywords=("output_index", "token_ids"),
        since="0.5.20",
    ),
)


@dataclass(frozen=True)
class RequestedRows:
    """The rows of one forward pass, and the sets that each row asks for.

    Attributes:
        request_ids: the id of each row's request.
        thresholds: each row's threshold p (`top_logprobs_p`); 0 if the row gets no set at a threshold.
        drawn: the indices, ascending, of the rows whose requests ask for the tokens that the sampler could
            draw.
        greedy: the indices of the rows that are sampled greedily.
        answers: whether SGLang sends this rank's results to the client. If `answers` is False, the hooks
            extract no sets on this rank. `drawn` still lists the rows, because the samplers of all ranks must
            run in the same way.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]
    drawn: tuple[int, ...] = ()
    greedy: frozenset[int] = frozenset()
    answers: bool = True

    @cached_property
    def asking(self) -> frozenset[int]:
        """The indices of the rows that ask for sets."""
        return frozenset([*self.drawn, *(row for row, p in enumerate(self.thresholds) if p)])


@dataclass
class ForwardPass:
    """One forward pass, for a batch with at least one request for sets.

    Attributes:
        rows: the rows of the pass.
        prompt: the candidate sets of the pass's prompt positions; None until the pass has scored its prompts.
        weights: float [R, W], the sampler's filtered probabilities, one row for each index in `rows.drawn`.
            None before the sampler has run, and if SGLang draws without probabilities, for example if the
            whole batch is greedy.
        token_ids: int32 [R, W], the token in each column of `weights`, most likely token first. None if W is
            the vocabulary size.
        generated: the sets of the sampled tokens; None until SGLang reports log-probs.
    """

    rows: RequestedRows
    prompt: PassSets | None = None
    weights: Tensor | None = None
    token_ids: Tensor | None = None
    generated: GeneratedSets | None = None

    def extract(self, logprobs: Tensor, sampled_ids: Tensor, weight_version: str) -> GeneratedSets:
        """Extract the sets of the sampled tokens.

        Args:
            logprobs: float [B, V], as for `sets.extract`. Rows at the end that only pad the batch get none.
            sampled_ids: integer [B].
            weight_version: the version of the weights that the pass uses.
        """
        rows, lowest = self.rows, lowest_logprob()
        # Copy the sampled tokens, because SGLang may overwrite them in place, for example when it
        # synchronizes the tokens of tensor-parallel ranks.
        sampled_ids = sampled_ids.clone()
        sets = drawn = None
        problems: dict[int, str] = {}
        if any(rows.thresholds):
            thresholds = (*rows.thresholds, *[0.0] * (len(logprobs) - len(rows.thresholds)))
            sets = extract(logprobs, thresholds, sampled_ids, lowest=lowest)
        if rows.drawn:
            is_filtered = to_device(np.array([row not in rows.greedy for row in rows.drawn]), logprobs.device)
            is_drawn = None if self.weights is None else self.weights > 0
            drawn = extract_support(
                logprobs, rows.drawn, is_drawn, self.token_ids, sampled_ids, is_filtered, lowest=lowest
            )
            if is_drawn is None:
                hidden = "SGLang sampled in a way that does not show what it could have drawn"
                problems = dict.fromkeys(set(rows.drawn) - rows.greedy, hidden)
        return GeneratedSets(rows, weight_version, sampled_ids, sets, drawn, problems=problems)


class TopLogprobsNums(list[int]):
    """SGLang's list `top_logprobs_nums`, with the `ForwardPass` of its batch as an attribute.

    Before the model runs, SGLang copies the `ForwardBatch` field by field, so the copy would lack any
    attribute that a hook adds. It keeps this list, and so does the metadata of the logits when SGLang scores
    prompts. If SGLang replaced the list, no hook would find the `ForwardPass`, and the requests that ask for
    sets would end with an error.
    """

    forward_pass: ForwardPass


@after("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new")
def note_requested_rows(forward_batch: Any, cls: type[Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the rows that ask for sets.

    The rows of the pass are in the order of the batch's requests.
    """
    rows = requested_rows(batch)
    if rows is not None:
        nums = TopLogprobsNums(forward_batch.top_logprobs_nums)
        nums.forward_pass = ForwardPass(rows)
        internals().carry(nums, batch, forward_batch)
    return forward_batch


def requested_rows(batch: Any) -> RequestedRows | None:
    """Return which requests of SGLang's `ScheduleBatch` ask for sets, or None if none does."""
    if not batch.return_logprob:
        return None
    answers = internals().answers_requests()
    wanted = [sets_request(req) for req in batch.reqs]
    thresholds = tuple(
        one.threshold if answers and not is_refused(req) else 0.0
        for one, req in zip(wanted, batch.reqs, strict=True)
    )
    drawn = tuple(row for row, one in enumerate(wanted) if one.is_from_sampler)
    if not any(thresholds) and not drawn:
        return None
    # A greedy request has a top_k of 1, because SGLang replaces temperature 0 with a top_k of 1.
    greedy = frozenset(row for row, req in enumerate(batch.reqs) if req.sampling_params.top_k == 1)
    return RequestedRows(tuple(req.rid for req in batch.reqs), thresholds, drawn, greedy, answers)


def forward_pass_of(top_logprobs_nums: list[int] | None) -> ForwardPass | None:
    """Return the `ForwardPass` attached to the list `top_logprobs_nums`, or None if there is none."""
    return getattr(top_logprobs_nums, "forward_pass", None)


# SGLang does not pass the `ForwardBatch` to `Sampler` and `OutputLogprobProcessor`.
_sampled_pass: ContextVar[ForwardPass | None] = ContextVar("sglang_topp_sampled_pass", default=None)


@around("sglang.srt.model_executor.model_runner.ModelRunner.sample")
def sample(original: Callable[..., Tensor], self: Any, logits_output: Any, forward_batch: Any) -> Tensor:
    """Extract a pass's sets and attach them to its output."""
    logits = logits_output.next_token_logits
    if logits is not None and is_staged(logits):
        warm_up(logits.shape[1], logits.dtype, logits.device)
    internals().begin_pass(logits_output)
    forward_pass = forward_pass_of(forward_batch.top_logprobs_nums)
    if forward_pass is None:
        return original(self, logits_output, forward_batch)
    token = _sampled_pass.set(forward_pass)
    try:
        next_token_ids = original(self, logits_output, forward_batch)
    finally:
        _sampled_pass.reset(token)
    rows = forward_pass.rows
    if rows.answers:
        generated = forward_pass.generated or GeneratedSets(rows, internals().weight_version())
        for sets in filter(None, (forward_pass.prompt, generated)):
            internals().attach(logits_output, sets)
    return next_token_ids


@around("sglang.srt.layers.sampler.Sampler._sample_from_probs", since="0.5.20")
def sample_from_probs(
    original: Callable[..., tuple[Tensor, Any]],
    self: Any,
    probs: Tensor,
    sampling_info: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Record the filtered probabilities of a sampler call.

    SGLang returns them only for the rows of requests with `return_sampling_mask`.
    """
    forward_pass = _sampled_pass.get()
    if forward_pass is None or not forward_pass.rows.drawn:
        return original(self, probs, sampling_info, *args, **kwargs)
    native = sampling_info.sampling_mask_batch_indices
    ours = to_device(np.array(forward_pass.rows.drawn), probs.device)
    # SGLang returns the filtered probabilities of the rows in `sampling_mask_batch_indices`. If a request
    # asks for SGLang's own sampling mask, two sets of rows are needed: SGLang's and `ours`. So ask for all
    # rows, and select both sets of rows from the result.
    asked = ours if native is None else torch.arange(len(probs), device=probs.device)
    sampling_info.sampling_mask_batch_indices = asked
    try:
        sampled_ids, captured = original(self, probs, sampling_info, *args, **kwargs)
    finally:
        sampling_info.sampling_mask_batch_indices = native
    forward_pass.weights, forward_pass.token_ids = captured.weights, captured.token_ids
    if native is None:
        return sampled_ids, None
    forward_pass.weights = captured.weights[ours]
    forward_pass.token_ids = None if captured.token_ids is None else captured.token_ids[ours]
    fields = ("weights", "token_ids", "selected_weight")
    own = {name: None if (each := getattr(captured, name)) is None else each[native] for name in fields}
    return sampled_ids, captured._replace(**own, batch_rows=native)


@around("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", since="0.5.22")
def rank_only_top_k(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Sort only `max_top_k` tokens per row.

    `max_top_k` is the largest top_k in the batch, if every row has a top_k. The sampler can draw only the
    `max_top_k` most likely tokens of each row, so it suffices to sort these tokens. Without this hook, SGLang
    sorts the whole vocabulary for every call with `return_filtered_probs`.

    If the batch has a sampling seed, SGLang sorts the whole vocabulary with or without this hook.
    """
    arguments = (top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
    is_wide = max_top_k is None or max_top_k >= probs.shape[-1]
    forward_pass = _sampled_pass.get()
    is_ours = forward_pass is not None and bool(forward_pass.rows.drawn)
    if not is_ours or not return_filtered_probs or sampling_seed is not None or is_wide:
        return original(probs, *arguments, return_filtered_probs=return_filtered_probs, max_top_k=max_top_k)
    assert max_top_k is not None
    highest, names = probs.topk(max_top_k, dim=-1, sorted=True)
    drawn, weights, columns, selected_weight = original(
        highest, *arguments, return_filtered_probs=True, max_top_k=None
    )
    names = names.to(torch.int32)
    token_ids = names.gather(1, columns.long())
    sampled_ids = names.gather(1, drawn.long()[:, None]).squeeze(1)
    return sampled_ids, weights, token_ids, selected_weight


@before("sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs", since="0.5.16")
def compute_logprobs(
    self: Any,
    logprobs: Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    batch_next_token_ids: Tensor,
) -> None:
    """Extract the sets of a pass.

    The hook runs before the hooked function, because that replaces log-probs of -inf in place.
    """
    _extract_generated(logprobs, batch_next_token_ids)


@before("sglang.srt.layers.sampler.Sampler._attach_logprobs_to_output", until="0.5.16")
def attach_logprobs(
    self: Any,
    logits_output: Any,
    logprobs: Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    sampling_info: Any,
    batch_next_token_ids: Tensor,
) -> None:
    """Extract a pass's sets on SGLang before 0.5.16."""
    _extract_generated(logprobs, batch_next_token_ids)


def _extract_generated(logprobs: Tensor, sampled_ids: Tensor) -> None:
    forward_pass = _sampled_pass.get()
    if forward_pass is not None and forward_pass.rows.answers:
        version = internals().weight_version()
        forward_pass.generated = forward_pass.extract(logprobs, sampled_ids, version)


@dataclass(frozen=True)
class GeneratedSets(PassSets):
    """The sets of the tokens that one forward pass drew, first on the device and later on the host.

    A pass draws one token for each row. A speculative verification draws up to `width` for each row that asks
    for sets (`verification`). Each of them has a slot: S slots, row after row.

    Attributes:
        rows: the pass's rows, as recorded when SGLang built the pass's batch.
        weight_version: the version of the weights that the pass used.
        token_ids: integer [S], the token that was drawn in each slot. None if SGLang reported no log-probs.
        sets: each slot's set at the threshold p (`top_logprobs_p`) of its row; None if no row has a
            threshold.
        drawn: for each slot of each row in `rows.drawn`, the set of tokens that the sampler could draw; None
            if there is no such row.
        slotted: the rows that have slots, ascending; None if every row has.
        width: the number of slots per row.
        accept_lens: int32, how many tokens each row in `slotted` drew; None if each drew `width`.
        is_inside: bool [S]. A token that had probability 0 where the verification drew it has False, and gets
            no set. None if every token is to get one.
        problems: the reason why a row gets no set, by the row's index.
    """

    rows: RequestedRows
    weight_version: str
    token_ids: Tensor | None = None
    sets: Sets | None = None
    drawn: Sets | None = None
    slotted: tuple[int, ...] | None = None
    width: int = 1
    accept_lens: Tensor | None = None
    is_inside: Tensor | None = None
    problems: Mapping[int, str] = field(default_factory=dict)

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the set of each new token to its request's `SetBuffer`.

        SGLang may append only some of the drawn tokens, because a stop condition or a grammar can end the
        request earlier. The n-th appended token must be the n-th one that was drawn in the request's row.
        Otherwise the row now belongs to another request, or SGLang replaced the token, and the request ends
        with an error.
        """
        rows, width = self.rows, self.width
        slotted = range(len(rows.request_ids)) if self.slotted is None else self.slotted
        first_slots = dict(zip(slotted, range(0, len(slotted) * width, width), strict=True))
        tokens, lens, is_inside = map(_listed, (self.token_ids, self.accept_lens, self.is_inside))
        found: list[PackedSet | str] = [""] * len(tokens) if self.sets is None else self.sets.on_host()
        if self.drawn is not None:
            slots = (first_slots[row] + i for row in rows.drawn for i in range(width))
            for slot, packed in zip(slots, self.drawn.on_host(), strict=True):
                found[slot] = packed
        for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None or row not in rows.asking or is_refused(req):
                continue
            problem = self.problems.get(row, "")
            if self.token_ids is None:
                problem = "SGLang sampled without reporting log-probs"
            if req.rid != rows.request_ids[row]:
                problem = f"row {row} was drawn for request {rows.request_ids[row]}"
            start = first_slots[row]
            stop = start + (lens[start // width] if lens else width)
            sets: list[PackedSet | str] = []
            for slot, token_id in enumerate(commit.token_ids, start):
                if problem:
                    sets.append(problem)
                elif slot >= stop:
                    sets.append("a token became visible without being drawn")
                elif token_id != tokens[slot]:
                    sets.append(f"token {token_id} became visible, and {tokens[slot]} was drawn")
                elif is_inside and not is_inside[slot]:
                    sets.append(f"verification drew token {token_id}, which is outside of its support")
                else:
                    sets.append(found[slot])
            add_sets(req, commit.output_index, sets, self.weight_version)


def _listed(tensor: Tensor | None) -> list[Any]:
    return [] if tensor is None else tensor.tolist()
