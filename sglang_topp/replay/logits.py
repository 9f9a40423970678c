"""The scores of a policy as one autograd node, from hidden states and an LM head, or from existing logits.

A source computes the raw outputs of single candidates, and those of all ids in a pass over the vocabulary.
The node computes every score from them, so each gradient of a tensor is summed before it is rounded.

- The softmax over the candidate sets takes the listed candidates, whose gradients per score are computed in
  the forward.
- The pass takes a chunk of rows at a time. Its forward keeps a few sums per row, and its backward computes
  the logits again, unless one chunk holds all rows.

Shape legend: T positions, R rows of the pass, V ids held by this rank without padding, C rows of a chunk or
of a slice of it, n candidates in all, A listed positions, m listed candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import CandidateIndex, Shard, first_true, reduce_max, reduce_sum
from sglang_topp.replay.lm_head import Source

# A log-prob is raised to this value before it is multiplied by its probability, because 0 * -inf is NaN. That
# changes no result: the probability is 0 in float32 and float64.
LOG_PROB_FLOOR = -1.0e4
# A chunk is worked on in slices of rows. On a CPU, the temporary tensors of a slice fit in the cache. On a
# GPU, a slice is enough work to amortize the kernel launches.
_SLICE_BYTES_CPU = 1 << 20
_SLICE_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """The conversion of an LM head's raw output `hidden . weight + bias` into the policy's logits `z`.

    ::

        z = softcap * tanh(logit_scale * raw / softcap) / temperature      in SGLang's order
        z = logit_scale * raw / temperature                                without a soft cap

    Raises:
        InvalidInputError: a number is not positive and finite.
    """

    temperature: float | Tensor
    """One number above 0, or a tensor [T] of numbers above 0."""
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise InvalidInputError(f"softcap: got {self.softcap}, expected a positive number or None")
        if not 0 < self.logit_scale < math.inf:
            raise InvalidInputError(
                f"logit_scale: got {self.logit_scale}, expected a positive number; for a model that divides"
                " its logits (Granite's logits_scaling), pass 1 over its divisor"
            )
        if not isinstance(self.temperature, Tensor) and not 0 < self.temperature < math.inf:
            raise InvalidInputError(f"temperature: got {self.temperature}, expected a positive number")

    def on(self, device: torch.device, num_positions: int, *, may_wait: bool) -> LogitTransform:
        """Check a `temperature` tensor, and copy it, because the caller may overwrite it before the backward.

        If `may_wait` is False, this method does not wait for the device. An invalid value in a `temperature`
        tensor on an accelerator then raises no error, but becomes NaN in the copy.

        Raises:
            InvalidInputError: `temperature` requires a gradient, or is neither one number nor one number per
                position, or a number is not positive and finite.
        """
        temperature = self.temperature
        if not isinstance(temperature, Tensor):
            return self
        if temperature.shape not in ((), (num_positions,)):
            raise InvalidInputError(
                f"temperature: got shape {tuple(temperature.shape)}, expected one number or [{num_positions}]"
            )
        if temperature.requires_grad:
            raise InvalidInputError("temperature: it requires a gradient, and none is computed; detach it")
        is_valid = (temperature > 0) & temperature.isfinite()
        checks = may_wait or temperature.device.type == "cpu"
        if checks and (bad := first_true(~is_valid.reshape(-1))) is not None:
            raise InvalidInputError(
                f"temperature: got {float(temperature.reshape(-1)[bad])} at position {bad}, expected above 0"
            )
        temperature = torch.where(is_valid, temperature, torch.nan).expand(num_positions)
        return replace(self, temperature=temperature.to(device))

    def __call__(self, raw: Tensor, positions: Tensor | slice) -> Tensor:
        """Return the logits of raw outputs [m] or [C, V] at the given positions, differentiable in `raw`."""
        logits = raw if self.logit_scale == 1.0 else raw * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if isinstance(self.temperature, Tensor):
            temperature = self.temperature[positions].to(logits)
            return logits / (temperature[:, None] if logits.ndim == 2 else temperature)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def leaf_and_logits(self, raw: Tensor, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return `raw` as a leaf that requires a gradient, and its logits."""
        leaf = raw.detach().requires_grad_()
        with torch.enable_grad():
            return leaf, self(leaf, positions)


@dataclass(frozen=True, eq=False)
class Policy:
    """Where a policy's logits come from."""

    source: Callable[..., Source]
    """Makes a source from tensors and the `rows` that a pass reads (None: all)."""
    shard: Shard
    transform: LogitTransform
    dtype: torch.dtype
    """The dtype of sums and results."""
    chunk_rows: int
    """How many rows a chunk of a pass has."""
    dense: Literal["head", "logits"]
    """The key of `DENSE_SHARES` that tells when a pass is faster than single logits."""


# A function that returns the gradient of the logits of some rows.
Term: TypeAlias = Callable[[slice, Tensor], Tensor]


class Other(NamedTuple):
    """The other distribution of a KL, with one more outcome for all ids outside of a set, or without."""

    logprobs: Tensor
    """[n]: the log-prob of each candidate. The probabilities of all outcomes at a position sum to 1."""
    log_outside: Tensor | None = None
    """[T]: the log-prob of all ids outside of the set."""
    is_first: bool = False
    """Whether the KL is KL(other || policy), and not KL(policy || other)."""


@dataclass(frozen=True, eq=False)
class Work:
    """Which scores of T positions a node computes."""

    policy: Policy
    index: CandidateIndex
    is_target: Tensor | None = None
    """bool [m]: whether each listed candidate is the target; None without scores of targets over sets."""
    columns: Tensor | None = None
    """int64 [R]: the column of each row's target on this rank, or -1; None without targets."""
    other: Other | None = None
    entropy: bool = False
    each: bool = False
    """Whether to return the log-prob of each candidate. Then all candidates are listed."""
    full: bool = False
    """Whether to score over the vocabulary too. Then the pass reads all positions."""

    @property
    def kinds(self) -> list[str]:
        """The softmaxes of the pass: over all ids, those outside of each set, and those of each dense set."""
        has_tail = self.other is not None and self.other.log_outside is not None
        return ["all"] * self.full + ["outside"] * has_tail + ["dense"] * (len(self.index.dense_rows) > 0)

    def parts(self) -> list[slice]:
        """Return the rows of each chunk of the pass."""
        num_rows, step = self.index.num_read, self.policy.chunk_rows
        return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]

    def blocks(self, part: slice, chunk: Tensor) -> Iterator[tuple[Tensor, slice, Tensor | slice]]:
        """Yield a few rows of a chunk at a time: their raw outputs, their rows of the pass, and positions."""
        num_rows, num_ids = chunk.shape
        num_bytes = _SLICE_BYTES_CPU if chunk.is_cpu else _SLICE_BYTES
        step = max(1, num_bytes // max(1, num_ids * chunk.itemsize))
        for first in range(0, num_rows if num_ids else 0, step):
            raw_CV = chunk[first : first + step]
            here = slice(part.start + first, part.start + first + len(raw_CV))
            yield raw_CV, here, here if self.index.read_rows is None else self.index.read_rows[here]

    def only(self, kind: str, here: slice, logits_CV: Tensor) -> Tensor:
        """Return the logits of some rows, -inf at the ids that a softmax leaves out."""
        if kind == "all":
            return logits_CV
        mask_CV = self.index.read_ids.mask(here, self.policy.shard.num_ids)
        return logits_CV.masked_fill(mask_CV if kind == "outside" else mask_CV.logical_not_(), -torch.inf)


def evaluate(work: Work, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Compute scores, differentiable once in the `tensors` that make a source.

    Returns:
        Over the candidate sets: each target's log-prob [T], the entropy [T], each candidate's log-prob [n],
        and the KL [T], which are the same on every rank, and 0 at positions without a choice. Over the
        vocabulary: each target's log-prob [T], and the entropy [T]. A score that `work` does not ask for is
        None.
    """
    results: tuple[Any, ...] = _Evaluate.apply(work, *tensors)
    return results


class _Evaluate(torch.autograd.Function):
    """The scores as one autograd node. Every rank must pass the same incoming gradients."""

    @staticmethod
    def forward(ctx: Any, work: Work, *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.work, ctx.num_tensors, ctx.kept = work, len(tensors), None
        index, ctx.device = work.index, work.index.token_ids.device
        with torch.autocast(ctx.device.type, enabled=False):
            source = work.policy.source(*tensors, rows=index.read_rows)
            raw, softmaxes, chunk = _read_vocabulary(work, source, ctx.device)
            if index.gathered is not None:
                raw.insert(0, source.gather(index.gathered))
            raw_m = raw[0] if len(raw) == 1 else torch.cat([chunk.new_empty(0), *raw])
            logits_m = work.policy.transform(raw_m, index.positions)
            outside, dense = softmaxes.get("outside", Softmax()), softmaxes.get("dense", Softmax())
            over_sets, slopes = _score_sets(work, logits_m, outside.log_total)
        at = index.dense_rows if work.full else slice(None)
        for of_sets, of_dense in zip(over_sets, dense[:2], strict=False):
            if of_sets is not None and of_dense is not None:
                of_sets.index_copy_(0, index.dense_rows, of_dense[at])
        if any(ctx.needs_input_grad):
            if softmaxes and work.policy.chunk_rows >= index.num_read:
                ctx.kept = chunk
            of_pass = [each for softmax in softmaxes.values() for each in softmax]
            ctx.save_for_backward(
                *source.saved(has_pass=index.num_read > 0), raw_m, *slopes.of_scores, *slopes[1:], *of_pass
            )
        return *over_sets, *softmaxes.get("all", Softmax())[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        work: Work = ctx.work
        index, saved = work.index, iter(ctx.saved_tensors)
        tensors, raw_m = list(itertools.islice(saved, ctx.num_tensors)), next(saved)
        slopes = _Slopes(tuple(itertools.islice(saved, 3)), next(saved), next(saved))
        softmaxes = {kind: Softmax(*itertools.islice(saved, 3)) for kind in work.kinds}
        gathered = grad_picked = chunks = None
        with torch.autocast(ctx.device.type, enabled=False):
            grad_m = slopes.gradient(index, grads)
            if grad_m is None and not index.num_read:
                grad_m = torch.zeros_like(raw_m)
            if grad_m is not None:
                leaf_m, logits_m = work.policy.transform.leaf_and_logits(raw_m, index.positions)
                (grad_picked,) = torch.autograd.grad(logits_m, leaf_m, grad_m)
                if index.gathered is not None:
                    num_gathered = len(index.gathered.ids)
                    gathered = index.gathered, grad_picked[:num_gathered]
                    grad_picked = grad_picked[num_gathered:]
            source = work.policy.source(*tensors, rows=index.read_rows)
            if index.num_read:
                # The gradient overwrites the kept raw outputs, so a second backward computes them again.
                kept, ctx.kept = ctx.kept, None
                terms = _terms(work, softmaxes, slopes, grads)
                chunks = _vocabulary_gradients(work, source, kept, terms, grad_picked)
            return None, *source.gradients(ctx.needs_input_grad[1:], gathered, chunks)


class _Slopes(NamedTuple):
    """The gradient of each score of a position over its set, in the logits of its listed candidates."""

    of_scores: Sequence[Tensor | None]
    """[m] each: those of the log-prob of the target, the entropy, and the KL."""
    probs: Tensor | None
    """[m]: the candidates' probabilities, if the log-prob of each is asked for."""
    kl_outside: Tensor | None
    """[A]: the gradient of the KL in the log-sum-exp of the logits outside of the set."""

    def gradient(self, index: CandidateIndex, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Return the gradient of the listed candidates' logits, or None, from those of all scores."""
        of_logprobs, of_entropy, of_each, of_kl, *_ = grads
        total_m = None
        for grad, slope_m in zip((of_logprobs, of_entropy, of_kl), self.of_scores, strict=True):
            if grad is not None and slope_m is not None:
                grad_m = grad.index_select(0, index.positions)
                total_m = grad_m.mul_(slope_m) if total_m is None else total_m.addcmul_(grad_m, slope_m)
        if of_each is not None and self.probs is not None:
            sums_T = index.sum_candidates(of_each.contiguous())
            grad_m = of_each.index_select(0, index.at)
            grad_m.addcmul_(sums_T.index_select(0, index.positions), self.probs, value=-1)
            total_m = grad_m if total_m is None else total_m.add_(grad_m)
        return total_m


def _score_sets(
    work: Work, logits_m: Tensor, log_outside_A: Tensor | None
) -> tuple[list[Tensor | None], _Slopes]:
    """Return the scores over the sets, and their gradients; 0 at positions that are not listed.

    The ids outside of a set are one more outcome, if `log_outside_A`, the log-sum-exp of their logits, is
    given.
    """
    index, group = work.index, work.policy.shard.group

    def sums_of(values_m: Tensor) -> Tensor:
        return torch.segment_reduce(values_m, "sum", offsets=index.offsets)

    def listed(values_A: Tensor) -> Tensor:
        return values_A.index_select(0, index.segment)

    def spread(values: Tensor, places: Tensor, length: int) -> Tensor:
        return values.new_zeros(length).index_copy_(0, places, values)

    peak_A = reduce_max(torch.segment_reduce(logits_m, "max", offsets=index.offsets), group)
    if log_outside_A is not None:
        peak_A = torch.maximum(peak_A, log_outside_A)
    shifted_m = logits_m - listed(peak_A)
    weight_m = shifted_m.exp()
    sums = [sums_of(weight_m)]
    if work.is_target is not None:
        sums.append(sums_of(torch.where(work.is_target, shifted_m, 0.0)))
    if work.entropy:
        sums.append(sums_of(weight_m * shifted_m.clamp(min=LOG_PROB_FLOOR)))
    total_A, *others = reduce_sum(torch.stack(sums), group)
    if log_outside_A is not None:
        log_outside_A = log_outside_A - peak_A
        total_A = total_A + log_outside_A.exp()
    log_total_A = total_A.log()
    logprobs_m = shifted_m - listed(log_total_A)
    p_m = logprobs_m.exp()
    values_A: list[Tensor | None] = [None] * 3
    slopes_m: list[Tensor | None] = [None] * 3
    each = of_outside = None
    if work.is_target is not None:
        values_A[0], slopes_m[0] = others[0] - log_total_A, work.is_target.to(p_m.dtype).sub_(p_m)
    if work.entropy:
        values_A[1] = entropy_A = log_total_A - others[-1] / total_A
        slopes_m[1] = (logprobs_m.clamp(min=LOG_PROB_FLOOR) + listed(entropy_A)).mul_(p_m).neg_()
    if work.other is not None:
        terms_m, of_kl = _kl(logprobs_m, work.other.logprobs.index_select(0, index.at), work.other.is_first)
        kl_A = reduce_sum(sums_of(terms_m), group)
        # In the log-probs of all outcomes, the gradients sum to the KL, or to 0 if the other policy is first.
        share = 0.0 if work.other.is_first else 1.0
        if log_outside_A is not None and work.other.log_outside is not None:
            log_outside_A = log_outside_A - log_total_A
            other_A = work.other.log_outside.index_select(0, index.rows)
            terms_A, of_outside = _kl(log_outside_A, other_A, work.other.is_first)
            kl_A = kl_A + terms_A
            of_outside = of_outside - log_outside_A.exp() * (share * kl_A)
        values_A[2], slopes_m[2] = kl_A, of_kl - p_m * listed(share * kl_A)
    if work.each:
        each = reduce_sum(spread(logprobs_m, index.at, len(index.token_ids)), group)
    logprobs, entropy, kl = (
        None if values is None else spread(values, index.rows, len(index.sizes)) for values in values_A
    )
    return [logprobs, entropy, each, kl], _Slopes(slopes_m, p_m if work.each else None, of_outside)


def _kl(log_p: Tensor, log_q: Tensor, q_is_first: bool) -> tuple[Tensor, Tensor]:
    """Return the KL terms `a log(a / b) + b - a`, none of them negative, and their gradients in `log_p`.

    `a` is the first distribution, and `b` the second. The probabilities of all outcomes at a position sum to
    1, so the sum of `b - a` is 0, and the sum of the terms is the KL. If `a` and `b` are almost equal, a
    rounding error in a log-prob changes a term only by about the square of the error. A small KL is therefore
    accurate too.
    """
    log_a, log_b = (log_q, log_p) if q_is_first else (log_p, log_q)
    a, b, ratio = log_a.exp(), log_b.exp(), log_b - log_a
    near = a * (torch.expm1(ratio) - ratio)
    terms = torch.where(a == 0, b, torch.where(ratio.abs() < 1, near, b - a - a * ratio))
    return terms, b - a if q_is_first else torch.where(a > 0, -a * ratio, 0.0)


class Softmax(NamedTuple):
    """The results of one softmax of a pass, or their gradients. Each tensor has one value per row."""

    logprobs: Tensor | None = None
    """[R]: the log-prob of each row's target."""
    entropy: Tensor | None = None
    log_total: Tensor | None = None
    """[R]: the log-sum-exp of each row's logits, -inf if none is above -inf."""


def _read_vocabulary(
    work: Work, source: Source, device: torch.device
) -> tuple[list[Tensor], dict[str, Softmax], Tensor]:
    """Return the picked raw outputs of each chunk, the softmaxes, and the last chunk's raw outputs."""
    shard, dtype, picked = work.policy.shard, work.policy.dtype, []
    chunk = torch.empty(0, dtype=dtype, device=device)
    sums = {kind: _Sums(work.index.num_read, dtype, device, work.entropy) for kind in work.kinds}
    for part in work.parts():
        chunk = source.raw(part)
        if len(work.index.picks.columns):
            picked.append(chunk.view(-1).index_select(0, work.index.picks.places(part, shard.num_ids)))
        for raw_CV, here, positions in work.blocks(part, chunk) if sums else ():
            logits_CV = work.policy.transform(raw_CV, positions)
            for kind, each in sums.items():
                column_C = None if work.columns is None else work.columns[here]
                each.add(here, work.only(kind, here, logits_CV), column_C)
    return picked, {kind: each.finish(shard.group) for kind, each in sums.items()}, chunk


def _vocabulary_gradients(
    work: Work, source: Source, kept: Tensor | None, terms: dict[str, Term], grad_picked: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each chunk, and the gradient of their raw outputs.

    Args:
        kept: the raw outputs of all rows, which the gradient overwrites, or None.
        terms: for each softmax with a gradient, a function that returns it.
        grad_picked: the gradient of the picked raw outputs.
    """
    num_ids = work.policy.shard.num_ids
    for part in work.parts():
        if terms:
            chunk = source.raw(part) if kept is None else kept
        elif grad_picked is not None:
            chunk = grad_picked.new_zeros((part.stop - part.start, num_ids))
        else:
            return
        for raw_CV, here, positions in work.blocks(part, chunk) if terms else ():
            leaf_CV, logits_CV = work.policy.transform.leaf_and_logits(raw_CV, positions)
            total, *others = [
                term(here, work.only(kind, here, logits_CV.detach())) for kind, term in terms.items()
            ]
            for other in others:
                total += other
            raw_CV.copy_(torch.autograd.grad(logits_CV, leaf_CV, total)[0])
        if grad_picked is not None and len(work.index.picks.columns):
            picks = work.index.picks
            chunk.view(-1).index_add_(0, picks.places(part, num_ids), grad_picked[picks.entries(part)])
        yield part, chunk


class _Sums:
    """The sums of one softmax on this rank. `finish` combines those of all ranks."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device, entropy: bool) -> None:
        self.peak_R = torch.full((num_rows,), -torch.inf, dtype=dtype, device=device)
        self.sums_KR = torch.zeros((3 if entropy else 2, num_rows), dtype=dtype, device=device)

    def add(self, here: slice, logits_CV: Tensor, column_C: Tensor | None) -> None:
        """Add up the logits of some rows."""
        peak_C = logits_CV.amax(dim=1)
        self.peak_R[here] = peak_C
        shifted_CV = logits_CV - torch.where(peak_C.isneginf(), 0.0, peak_C)[:, None]
        weight_CV = shifted_CV.exp()
        total_R, target_R, *moments = self.sums_KR
        total_R[here] = weight_CV.sum(dim=1)
        if column_C is not None:
            target_C = logits_CV.gather(1, column_C.clamp(min=0)[:, None]).squeeze(1)
            target_R[here] = torch.where(column_C >= 0, target_C, 0.0)
        for moment_R in moments:
            moment_R[here] = torch.linalg.vecdot(weight_CV, shifted_CV.clamp_(min=LOG_PROB_FLOOR))

    def finish(self, group: dist.ProcessGroup | None) -> Softmax:
        """Combine the sums of all ranks, with two reductions."""
        peak_R = reduce_max(self.peak_R.clone(), group)
        peak_R = torch.where(peak_R.isneginf(), 0.0, peak_R)
        drop_R = (self.peak_R - peak_R).clamp(min=LOG_PROB_FLOOR)
        total_R, _, *moments = self.sums_KR
        for moment_R in moments:
            moment_R.addcmul_(total_R, drop_R).mul_(drop_R.exp())
        total_R.mul_(drop_R.exp())
        total_R, target_R, *moments = reduce_sum(self.sums_KR, group)
        log_total_R = total_R.log()
        entropy_R = log_total_R - moments[0] / total_R if moments else None
        return Softmax(target_R - peak_R - log_total_R, entropy_R, peak_R + log_total_R)


def _terms(
    work: Work, softmaxes: dict[str, Softmax], slopes: _Slopes, grads: tuple[Tensor | None, ...]
) -> dict[str, Term]:
    """Return a function for each softmax of the pass that has a gradient."""
    index, (of_logprobs, of_entropy, _, of_kl, *of_all) = work.index, grads
    of_outside = None
    if of_kl is not None and slopes.kl_outside is not None:
        of_outside = of_kl.index_select(0, index.rows).mul_(slopes.kl_outside)

    def of_dense(grad_T: Tensor | None) -> Tensor | None:
        if grad_T is None or not work.full:
            return None if grad_T is None else grad_T.index_select(0, index.dense_rows)
        is_other_T = torch.ones_like(grad_T, dtype=torch.bool).index_fill_(0, index.dense_rows, False)
        return grad_T.masked_fill(is_other_T, 0.0)

    given = {
        "all": Softmax(*of_all),
        "outside": Softmax(log_total=of_outside),
        "dense": Softmax(of_dense(of_logprobs), of_dense(of_entropy)),
    }
    return {
        kind: _term(result, given[kind], work.columns)
        for kind, result in softmaxes.items()
        if any(grad is not None for grad in given[kind])
    }


def _term(result: Softmax, grads: Softmax, columns: Tensor | None) -> Term:
    """Return a function that returns the gradient of some rows' logits.

    For the log-probs `log p_i`, and the entropy `H`, the gradient is::

        [i is target] * grad_logprob + p_i * (grad_log_total - grad_logprob - grad_entropy * (log p_i + H))
    """
    # Where no logit is above -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
    assert result.log_total is not None
    is_empty_R = result.log_total.isneginf()
    log_total_R = result.log_total.masked_fill(is_empty_R, 0.0)
    factor_R = torch.zeros_like(log_total_R) if grads.log_total is None else grads.log_total
    if grads.logprobs is not None:
        factor_R = factor_R - grads.logprobs
    if grads.entropy is not None and result.entropy is not None:
        entropy_R = result.entropy.masked_fill(is_empty_R, 0.0)
        factor_R = torch.addcmul(factor_R, grads.entropy, entropy_R, value=-1)

    def term(here: slice, logits_CV: Tensor) -> Tensor:
        logprobs_CV = logits_CV - log_total_R[here, None]
        p_CV, factor = logprobs_CV.exp(), factor_R[here, None]
        if grads.entropy is not None:
            of_entropy_CV = logprobs_CV.clamp_(LOG_PROB_FLOOR).mul_(grads.entropy[here, None])
            factor = torch.sub(factor, of_entropy_CV, out=of_entropy_CV)
        grad_CV = p_CV.mul_(factor)
        if grads.logprobs is not None and columns is not None:
            column_C = columns[here]
            of_target_C = torch.where(column_C >= 0, grads.logprobs[here], 0.0)
            grad_CV.scatter_add_(1, column_C.clamp(min=0)[:, None], of_target_C[:, None])
        return grad_CV

    return term
