"""The first pipeline stage receives exactly the sets that the last stage sends."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_topp_patches.releases import Feature, append, refused
from sglang_topp_patches.scheduler.pipeline import add_to_stage_output, take_from_stage_output
from sglang_topp_patches.scheduler.prompts import PromptSets
from sglang_topp_patches.scheduler.requests import Weights
from sglang_topp_patches.scheduler.sets import PassSets, extract
from sglang_topp_patches.scheduler.step import ForwardPass, RequestedRows

if reason := refused(Feature.PIPELINE):
    pytest.skip(f"refused on this SGLang: {reason}", allow_module_level=True)

from sglang.srt.sampling.sampling_observer_pp import (
    add_auxiliary_output_to_pp_tensors,
    pop_auxiliary_output_from_pp_tensors,
)

VOCAB = 32


@pytest.fixture
def sets() -> list[PassSets]:
    """Return the sets of a prompt's five rows in two chunks and of three tokens, with two errors."""
    logprobs = torch.log_softmax(torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)) * 3, -1)
    logprobs[6, 4] = torch.nan
    ids = torch.arange(8)
    chunks = [
        extract(logprobs[rows], [0.9] * len(ids[rows]), ids[rows]) for rows in (slice(0, 2), slice(2, 5))
    ]
    rows = RequestedRows(("a", "b", "c"), (0.9, 0.9, 0.0), drawn=(2,))
    prompt = PromptSets(rows, (3, 2, 0), chunks, Weights(0, "7"), {1: ("why", 413)})
    generated = ForwardPass(rows, weights=torch.ones(1, VOCAB)).extract(logprobs[5:], ids[5:], "default")
    assert generated.sets is not None
    assert generated.drawn is not None
    assert [type(each) for each in generated.sets.on_host()] == [tuple, str, tuple]
    return [prompt, generated]


@dataclass(frozen=True)
class OtherPlugin:
    """Another plugin's output and observer."""

    tensor: torch.Tensor

    def copy_to_host(self, copy_tensor: Any) -> OtherPlugin:
        return OtherPlugin(copy_tensor(self.tensor))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        raise NotImplementedError

    def to_pp_tensors(self) -> dict[str, torch.Tensor]:
        return {"theirs": self.tensor}

    def before_grammar(self) -> None: ...

    def from_pp_tensors(self, tensors: dict[str, torch.Tensor]) -> OtherPlugin:
        return OtherPlugin(tensors["theirs"])


def send(monkeypatch: pytest.MonkeyPatch, output: Any, num_ranks: int) -> dict[str, Any]:
    """Pass a result between stages: tensors unchanged, everything else pickled."""
    parallel = SimpleNamespace(attn_tp_size=num_ranks)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    tensors: dict[str, Any] = {"next_token_ids": torch.arange(3)}
    add_to_stage_output(add_auxiliary_output_to_pp_tensors, tensors, output)
    return {
        key: value if torch.is_tensor(value) else pickle.loads(pickle.dumps(value))
        for key, value in tensors.items()
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal, with tensors compared by content."""
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_all_of_it_arrives(monkeypatch: pytest.MonkeyPatch, sets: list[PassSets], num_ranks: int) -> None:
    tensors = send(monkeypatch, append(*sets), num_ranks)
    # SGLang splits tensors among tensor-parallel ranks, but only one of them has sets.
    ours = [value for key, value in tensors.items() if key.startswith("sglang_topp.")]
    assert len(ours) == 13
    assert all(num_ranks == 1 or len(tensor) % num_ranks for tensor in ours)
    arrived = take_from_stage_output(pop_auxiliary_output_from_pp_tensors, tensors, None)
    assert same(list(arrived.outputs), sets)
    assert not same(list(arrived.outputs), sets[::-1])
    # The next stage receives the same data as without the plugin.
    assert list(tensors) == ["next_token_ids"]


def test_no_sets_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = send(monkeypatch, None, 1)
    assert list(tensors) == ["next_token_ids"]
    assert take_from_stage_output(pop_auxiliary_output_from_pp_tensors, tensors, None) is None


def test_another_plugins_output_goes_its_own_way(
    monkeypatch: pytest.MonkeyPatch, sets: list[PassSets]
) -> None:
    theirs = OtherPlugin(torch.arange(4))
    ours = append(*sets)
    for output in (append(theirs, ours), append(ours, theirs)):
        tensors = send(monkeypatch, output, 2)
        arrived = take_from_stage_output(pop_auxiliary_output_from_pp_tensors, tensors, theirs)
        assert same(arrived.outputs[0], theirs)
        assert same(list(arrived.outputs[1:]), sets)
        assert list(tensors) == ["next_token_ids"]
