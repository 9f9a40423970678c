"""In the scheduler processes, extract the candidate sets of tokens that speculative verification accepts.

A verification draws several tokens for each request: the accepted drafts, and one more token. The drafts of a
request form a tree. The sampling kernel draws each token from the target model's distribution at one node of
the draft tree.

The hook `sample` wraps SGLang's `eagle_sample`, and records the inputs and results of the sampling kernel.
The hook `compute_logprobs` wraps SGLang's function that reports the log-probs of accepted tokens, and
extracts the sets of these tokens.

Only the device knows how many tokens each request accepted, so the host reserves room for the largest
possible number: one *slot* for each level of the draft tree. The kernel draws the first token at the tree's
root, and each further token at the node of the draft that was accepted just before it. A slot holds the index
of the node at which its token was drawn. A slot without a token holds the root's index, and gets no set.

Shape legend: B is the number of requests. R of these requests ask for sets, and R' of the R requests have
`top_logprobs_source: "sampler"`. Each request has A slots, so the R requests have S = R * A slots. N is the
number of nodes in all draft trees. V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_topp.nucleus.host_to_device import to_device
from sglang_topp_patches.hooks import around
from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler.customized_info import add_sets, lowest_logprob
from sglang_topp_patches.scheduler.extraction import Sets, extract, extract_support
from sglang_topp_patches.scheduler.pipeline_parallel import PassSets
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import is_refused
from sglang_topp_patches.scheduler.requested_rows import RequestedRows, requested_rows
from sglang_topp_patches.set_buffer import PackedSet

__all__ = ["VerifiedSets", "compute_logprobs", "sample"]

_FIELD = "sglang_topp_verification"


@around("sglang.srt.speculative.eagle_utils.eagle_sample", since="0.5.15")
def sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Record the tokens that a verification drew or could draw."""
    internals().begin_pass(logits_output)
    setattr(logits_output, _FIELD, None)
    rows = None if batch.forward_mode.is_idle() else requested_rows(batch)
    if rows is None or not rows.answers:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    verification = _Verification(rows)
    with _kernels_replaced_by(verification.draw):
        result = original(verify_input, batch, logits_output, *args, **kwargs)
    verification.result = result
    setattr(logits_output, _FIELD, verification)
    return result


@around("sglang.srt.layers.logprob_processor.compute_spec_logprobs", since="0.5.18", state=SchedulerProcess)
@around(
    "sglang.srt.layers.logprob_processor.compute_spec_v2_logprobs",
    since="0.5.16",
    until="0.5.18",
    state=SchedulerProcess,
)
@around(
    "sglang.srt.layers.utils.logprob.compute_spec_v2_logprobs",
    since="0.5.15",
    until="0.5.16",
    state=SchedulerProcess,
)
def compute_logprobs(
    process: SchedulerProcess,
    original: Callable[..., None],
    batch: Any,
    logits_output: Any,
    predict: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extract a verification's sets.

    Some speculative algorithms call `compute_spec_logprobs` or `compute_spec_v2_logprobs` with tokens that
    `eagle_sample` did not draw. A token that `eagle_sample` did not draw gets no set, and the token's request
    ends with an error.
    """
    original(batch, logits_output, predict, *args, **kwargs)
    verification: _Verification | None = getattr(logits_output, _FIELD, None)
    if verification is None or verification.result[0] is not predict:
        return
    setattr(logits_output, _FIELD, None)
    sets = verification.sets(process, logits_output.next_token_logits, batch.sampling_info)
    internals().attach(logits_output, PassSets((sets,)))


@contextmanager
def _kernels_replaced_by(draw: Callable[..., Any]) -> Iterator[None]:
    """Make SGLang call `draw(kernel, ...)` instead of each sampling kernel while the `with` block runs.

    SGLang looks up each sampling kernel by its name at every call, so SGLang finds the replacement.
    """
    with ExitStack() as stack:
        for module, name in internals().verification_kernels():
            kernel = getattr(module, name, None)
            if kernel is not None:  # some releases of SGLang lack this kernel
                setattr(module, name, partial(draw, kernel))
                stack.callback(setattr, module, name, kernel)
        yield


class _Verification:
    """One verification of draft tokens, for a batch with at least one request for sets.

    Attributes:
        rows: the requests of the batch, and the sets that each request asks for.
        asking: the indices of the requests that ask for sets, ascending.
        result: the three tensors that `eagle_sample` returns. `result[0]`, int32 [N], holds the token that
            was drawn at each node of the draft trees. `result[1]`, int32 [B], holds the number of tokens that
            each request accepted. `result[2]`, int32 [B, A], holds the index of the node at which each
            accepted token was drawn. SGLang writes -1 to the slots without an accepted token, and `_nodes`
            replaces -1 with the index of the tree's root.
        is_drawn: bool [R' * A, V]. For each slot of the R' requests with `top_logprobs_source: "sampler"`
            (`rows.drawn`), `is_drawn` marks the tokens that SGLang's sampling kernel could draw. `is_drawn`
            is None if SGLang called no sampling kernel.
        is_inside: bool [S], one value for each slot of the requests in `asking`. The value is False if the
            token that SGLang's sampling kernel drew for the slot had probability 0 in the kernel's input.
            Such a token gets no set. `is_inside` is None if SGLang called no sampling kernel.
    """

    def __init__(self, rows: RequestedRows) -> None:
        self.rows = rows
        self.asking = tuple(row for row in range(len(rows.thresholds)) if rows.asks(row))
        self.result: Any = None
        self.is_drawn: Tensor | None = None
        self.is_inside: Tensor | None = None

    def draw(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of SGLang's sampling kernels, and record which tokens the kernel could draw."""
        result = kernel(*args, **kwargs)
        probs_NV = kwargs["target_probs"].flatten(0, 1)
        nodes_RA = self._nodes(kwargs["accept_index"], self.asking)
        nodes_S = nodes_RA.flatten()
        self.is_inside = probs_NV[nodes_S, kwargs["predicts"][nodes_S].long()] > 0
        if self.rows.drawn:
            drawn = nodes_RA[_to_device([self.asking.index(row) for row in self.rows.drawn], nodes_RA.device)]
            self.is_drawn = probs_NV[drawn.flatten()] > 0
        return result

    def sets(self, process: SchedulerProcess, logits_NV: Tensor, sampling_info: Any) -> VerifiedSets:
        """Recompute the log-probs that SGLang reports, and extract the sets from these log-probs."""
        predict, accept_lens, accept_index = self.result
        device, width = logits_NV.device, accept_index.shape[1]
        nodes_S = self._nodes(accept_index, self.asking).flatten()
        lens_R = accept_lens[_to_device(self.asking, device)]
        is_taken_S = (torch.arange(width, device=device) < lens_R[:, None]).flatten()
        logits_SV, tokens_S = logits_NV[nodes_S], predict[nodes_S]
        if not sampling_info.is_all_greedy:
            temperatures = sampling_info.temperatures[_to_device(self.asking, device)]
            logits_SV = logits_SV / temperatures.repeat_interleave(width, dim=0)
        logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
        lowest = lowest_logprob()
        thresholds = [self.rows.thresholds[row] for row in self.asking for _ in range(width)]
        sets = drawn = None
        if any(thresholds):
            sets = extract(process, logprobs_SV, thresholds, tokens_S, lowest=lowest, is_taken=is_taken_S)
        if self.rows.drawn:
            drawn = self._drawn(process, logprobs_SV, tokens_S, is_taken_S, width, lowest)
        return VerifiedSets(
            self.rows,
            self.asking,
            width,
            internals().weight_version(),
            sets,
            drawn,
            tokens_S.int(),
            lens_R.int(),
            self.is_inside,
        )

    def _drawn(
        self,
        process: SchedulerProcess,
        logprobs_SV: Tensor,
        tokens_S: Tensor,
        is_taken_S: Tensor,
        width: int,
        lowest: float | None,
    ) -> Sets:
        """For each slot of the requests in `rows.drawn`, extract the tokens that the kernel could draw."""
        device = logprobs_SV.device
        slots = [self.asking.index(row) * width + slot for row in self.rows.drawn for slot in range(width)]
        at = _to_device(slots, device)
        is_greedy = [row in self.rows.greedy for row in self.rows.drawn for _ in range(width)]
        if self.is_drawn is not None:
            is_wanted = is_taken_S[at] & ~_to_device(is_greedy, device)
            is_drawn = self.is_drawn & is_wanted[:, None]
            return extract_support(process, logprobs_SV, at, is_drawn, None, tokens_S, lowest=lowest)
        nothing = torch.zeros((len(slots), 1), dtype=torch.bool, device=device)
        tokens = tokens_S[at][:, None].int()
        return extract_support(process, logprobs_SV, at, nothing, tokens, tokens_S, lowest=lowest)

    @staticmethod
    def _nodes(accept_index_BA: Tensor, asking: Sequence[int]) -> Tensor:
        """Return int64 [R, A]: the node at which each slot's token was drawn, for the requests in `asking`.

        A slot without an accepted token gets the index of the draft tree's root node.
        """
        nodes_RA = accept_index_BA[_to_device(asking, accept_index_BA.device)].long()
        return torch.where(nodes_RA < 0, nodes_RA[:, :1], nodes_RA)


def _to_device(values: Sequence[int] | Sequence[bool], device: torch.device) -> Tensor:
    return to_device(np.asarray(values), device)


@dataclass(frozen=True)
class VerifiedSets:
    """The sets of the tokens that one verification accepted, in tensors on the device or on the host.

    Attributes:
        rows: the requests of the batch, as recorded when the verification ran.
        asking: the indices of the requests that ask for sets, ascending.
        width: A, the number of slots per request.
        weight_version: the weight version with which the verification ran.
        sets: each slot's set at the threshold p (`top_logprobs_p`) of the slot's request, S sets in all; None
            if no request has a threshold.
        drawn: for each slot of each request with `top_logprobs_source: "sampler"` (`rows.drawn`), the set of
            tokens that SGLang's sampling kernel could draw; None if there is no such request.
        token_ids: int32 [S], the token that `eagle_sample` returned for each slot.
        accept_lens: int32 [R], the number of tokens that the verification accepted for each request.
        is_inside: bool [S], one value for each slot of the requests in `asking`. The value is False if the
            token that SGLang's sampling kernel drew for the slot had probability 0 in the kernel's input.
            Such a token gets no set. `is_inside` is None if SGLang called no sampling kernel.
    """

    rows: RequestedRows
    asking: tuple[int, ...]
    width: int
    weight_version: str
    sets: Sets | None
    drawn: Sets | None
    token_ids: Tensor
    accept_lens: Tensor
    is_inside: Tensor | None

    def settled(self) -> VerifiedSets:
        """Return a copy of this object in which no set is in a staging area (`scheduler.gpu_staging`).

        If some sets are in a staging area, this method waits for the device.
        """
        return replace(
            self, sets=self.sets and self.sets.settled(), drawn=self.drawn and self.drawn.settled()
        )

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> VerifiedSets:
        """Start copying the sets to the host. SGLang waits for these copies before `consume` runs."""
        return replace(
            self,
            sets=self.sets and self.sets.map(copy_tensor),
            drawn=self.drawn and self.drawn.map(copy_tensor),
            token_ids=copy_tensor(self.token_ids),
            accept_lens=copy_tensor(self.accept_lens),
            is_inside=None if self.is_inside is None else copy_tensor(self.is_inside),
        )

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the set of each new token to its request's `SetBuffer`.

        SGLang may append only some of the accepted tokens, because a stop condition or a grammar can end the
        request earlier. The n-th appended token must equal the request's n-th accepted token. If they differ,
        the request ends with an error.
        """
        by_place = dict(zip(self.asking, range(len(self.asking)), strict=True))
        found = self._by_slot()
        verified, lens = self.token_ids.tolist(), self.accept_lens.tolist()
        for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None or row not in by_place or is_refused(req):
                continue
            place = by_place[row]
            slots = range(place * self.width, place * self.width + lens[place])
            moved = ""
            if req.rid != self.rows.request_ids[row]:
                moved = f"row {row} was verified for request {self.rows.request_ids[row]}"
            entries: list[tuple[PackedSet | None, str]] = []
            for slot, token_id in zip(slots, commit.token_ids, strict=False):
                packed_set, problem = found[slot]
                problem = moved or problem
                if not problem and token_id != verified[slot]:
                    problem = f"token {token_id} became visible, and verification drew {verified[slot]}"
                entries.append((None if problem else packed_set, problem))
            missing = len(commit.token_ids) - len(entries)
            entries += [(None, "a token became visible without being verified")] * missing
            add_sets(req, commit.output_index, entries, self.weight_version)

    def _by_slot(self) -> list[tuple[PackedSet | None, str]]:
        """Return one pair per slot of the verification: `(set, "")`, or `(None, reason)` without a set."""
        count = len(self.asking) * self.width
        found: list[tuple[PackedSet | None, str]] = [
            (None, "SGLang verified without reporting log-probs")
        ] * count
        width, drawn = self.width, self.rows.drawn
        starts = [self.asking.index(row) * width for row in drawn]
        of_drawn = [start + slot for start in starts for slot in range(width)]
        by_threshold = [slot for slot in range(count) if self.rows.thresholds[self.asking[slot // width]]]
        for sets, slots, places in (
            (self.sets, by_threshold, by_threshold),
            (self.drawn, of_drawn, range(len(of_drawn))),
        ):
            if sets is None:
                continue
            on_host = sets.on_host()
            packed = on_host.packed_sets()
            for slot, place in zip(slots, places, strict=True):
                problem = on_host.problems.get(place, "")
                found[slot] = (None if problem else packed[place], problem)
        for slot in range(count):
            if problem := self._drawing_problem(slot):
                found[slot] = (None, problem)
        return found

    def _drawing_problem(self, slot: int) -> str:
        """Return why SGLang could not draw the token in a slot, or an empty string if SGLang could draw it.

        `is_inside` records whether SGLang's sampling kernel could have drawn the token. If SGLang called no
        sampling kernel, this method returns an empty string for a greedy request, and an error message for
        any other request.
        """
        if self.is_inside is not None:
            token_id = int(self.token_ids[slot])
            inside = bool(self.is_inside[slot])
            return "" if inside else f"verification drew token {token_id}, which is outside of its support"
        if self.asking[slot // self.width] in self.rows.greedy:
            return ""
        return "SGLang verified in a way that does not show what it drew from"
