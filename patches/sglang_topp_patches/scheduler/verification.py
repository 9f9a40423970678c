"""Extract the candidate sets of the tokens that a speculative verification accepts.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp_patches.hooks import around
from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler.sets import extract, extract_support, lowest_logprob
from sglang_topp_patches.scheduler.step import GeneratedSets, RequestedRows, requested_rows

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


@around("sglang.srt.layers.logprob_processor.compute_spec_logprobs", since="0.5.18")
@around("sglang.srt.layers.logprob_processor.compute_spec_v2_logprobs", since="0.5.16", until="0.5.18")
@around("sglang.srt.layers.utils.logprob.compute_spec_v2_logprobs", since="0.5.15", until="0.5.16")
def compute_logprobs(
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
    sets = verification.sets(logits_output.next_token_logits, batch.sampling_info)
    internals().attach(logits_output, sets)


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
            `is_inside` is None if SGLang called no sampling kernel.
    """

    def __init__(self, rows: RequestedRows) -> None:
        self.rows = rows
        self.asking = tuple(sorted(rows.asking))
        self.result: Any = None
        self.is_drawn: Tensor | None = None
        self.is_inside: Tensor | None = None

    def draw(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of SGLang's sampling kernels, and record which tokens the kernel could draw."""
        result = kernel(*args, **kwargs)
        probs_NV = kwargs["target_probs"].flatten(0, 1)
        nodes_S = self._nodes(kwargs["accept_index"], self.asking)
        self.is_inside = probs_NV[nodes_S, kwargs["predicts"][nodes_S].long()] > 0
        if self.rows.drawn:
            self.is_drawn = probs_NV[self._nodes(kwargs["accept_index"], self.rows.drawn)] > 0
        return result

    def sets(self, logits_NV: Tensor, sampling_info: Any) -> GeneratedSets:
        """Recompute the log-probs that SGLang reports, and extract the sets from these log-probs."""
        rows, (predict, accept_lens, accept_index) = self.rows, self.result
        device, width = logits_NV.device, accept_index.shape[1]
        asking_R = to_device(np.array(self.asking), device)
        nodes_S, lens_R = self._nodes(accept_index, self.asking), accept_lens[asking_R]
        is_taken_S = (torch.arange(width, device=device) < lens_R[:, None]).flatten()
        logits_SV, tokens_S = logits_NV[nodes_S], predict[nodes_S]
        if not sampling_info.is_all_greedy:
            temperatures = sampling_info.temperatures[asking_R]
            logits_SV = logits_SV / temperatures.repeat_interleave(width, dim=0)
        logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
        lowest = lowest_logprob()
        thresholds = [rows.thresholds[row] for row in self.asking for _ in range(width)]
        sets = drawn = None
        if any(thresholds):
            sets = extract(logprobs_SV, thresholds, tokens_S, lowest=lowest, is_taken=is_taken_S)
        if rows.drawn:
            slots = [self.asking.index(row) * width + slot for row in rows.drawn for slot in range(width)]
            is_sampled = to_device(np.repeat([row not in rows.greedy for row in rows.drawn], width), device)
            is_filtered = is_sampled & is_taken_S[to_device(np.array(slots), device)]
            drawn = extract_support(
                logprobs_SV, slots, self.is_drawn, None, tokens_S, is_filtered, lowest=lowest
            )
        hidden = rows.asking - rows.greedy if self.is_inside is None else ()
        return GeneratedSets(
            rows,
            internals().weight_version(),
            tokens_S,
            sets,
            drawn,
            self.asking,
            width,
            lens_R,
            self.is_inside,
            dict.fromkeys(hidden, "SGLang verified in a way that does not show what it drew from"),
        )

    @staticmethod
    def _nodes(accept_index_BA: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the node at which the token of each slot of some requests was drawn, int64.

        A slot without an accepted token gets the index of the draft tree's root node.
        """
        nodes = accept_index_BA[to_device(np.array(rows), accept_index_BA.device)].long()
        return torch.where(nodes < 0, nodes[:, :1], nodes).flatten()
