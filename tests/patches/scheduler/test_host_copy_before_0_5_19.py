"""On releases without auxiliary outputs, the hooks commit the sets of visible tokens exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_topp_patches.releases import Outputs, Sglang0516, take
from sglang_topp_patches.scheduler import host_copy_before_0_5_19
from sglang_topp_patches.scheduler.host_copy_before_0_5_19 import Committed
from sglang_topp_patches.set_buffer import KEY, SetBuffer


class Output:
    """An output that records its commits."""

    def __init__(self) -> None:
        self.tensor = torch.arange(3)
        self.copies = 0
        self.consumed: list[list[Committed | None]] = []

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        assert torch.equal(copy_tensor(self.tensor), self.tensor)
        self.copies += 1
        return self

    def consume(self, batch: Any, commits: Sequence[Committed | None]) -> None:
        self.consumed.append(list(commits))


def request(*output_ids: int) -> Any:
    return SimpleNamespace(output_ids=list(output_ids), finished_len=None, customized_info=None)


@pytest.fixture
def result() -> Any:
    """Return a pass's result with sets."""
    logits_output = SimpleNamespace()
    Sglang0516().attach(logits_output, Output())
    return SimpleNamespace(logits_output=logits_output)


def step(batch: Any, result: Any, appending: Callable[[], None]) -> None:
    """Do what SGLang does with a result: append the tokens, and then send them."""

    def original(self: Any, batch: Any, result: Any) -> None:
        appending()
        host_copy_before_0_5_19.commit(None, batch.reqs, True)

    host_copy_before_0_5_19.process(original, None, batch, result)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_became_visible_is_committed_once(result: Any, overlap: bool) -> None:
    output = result.logits_output.sglang_topp_device_output
    if overlap:
        host_copy_before_0_5_19.copy_to_host(result, True)
        assert output.copies == 1
    grows, stays, stops = request(5, 6), request(7), request(8, 9)
    batch = SimpleNamespace(reqs=[grows, stays, stops])

    def appending() -> None:
        grows.output_ids.append(11)
        stops.output_ids.append(12)  # a stop string ended it before this token
        stops.finished_len = 2

    step(batch, result, appending)
    assert output.copies == 1
    assert output.consumed == [[Committed(2, (11,)), None, None]]
    # A second pass over this result, and the next result without sets, commit nothing.
    step(batch, result, lambda: grows.output_ids.append(13))
    step(batch, SimpleNamespace(logits_output=SimpleNamespace()), lambda: grows.output_ids.append(14))
    assert len(output.consumed) == 1


def test_a_step_that_fails_leaves_nothing_behind(result: Any) -> None:
    output = result.logits_output.sglang_topp_device_output
    batch = SimpleNamespace(reqs=[request(1)])

    def failing(self: Any, batch: Any, result: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        host_copy_before_0_5_19.process(failing, None, batch, result)
    host_copy_before_0_5_19.commit(None, batch.reqs, True)
    assert output.consumed == []


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefill_servers_tokens_are_committed_when_all_are_there(result: Any, overlap: bool) -> None:
    output = result.logits_output.sglang_topp_device_output
    if overlap:
        host_copy_before_0_5_19.copy_to_host(result, True)
    first, failed, last = request(), request(), request()
    batch = SimpleNamespace(reqs=[first, failed, last])

    def original(self: Any, batch: Any, result: Any) -> None:
        first.output_ids.append(11)
        host_copy_before_0_5_19.commit(None, [failed], True)  # which is sent at once, with the reason
        assert not output.consumed
        last.output_ids.append(12)

    host_copy_before_0_5_19.process_on_prefill_server(original, None, batch, result)
    assert output.consumed == [[Committed(0, (11,)), None, Committed(0, (12,))]]
    host_copy_before_0_5_19.commit(None, [first, last], True)
    host_copy_before_0_5_19.process_on_prefill_server(lambda *_: None, None, batch, result)
    assert len(output.consumed) == 1


def test_a_pass_begins_without_the_sets_of_another(result: Any) -> None:
    Sglang0516().begin_pass(result.logits_output)
    assert take(result.logits_output) is None


def test_several_outputs_of_a_pass_are_consumed_in_order(result: Any) -> None:
    first, second, third = (Output() for _ in range(3))
    internals = Sglang0516()
    for output in (first, second, third):
        internals.attach(result.logits_output, output)
    taken = take(result.logits_output)
    assert isinstance(taken, Outputs)
    assert taken.outputs[1:] == (first, second, third)
    taken.copy_to_host(lambda tensor: tensor).consume(None, [None])
    assert [output.consumed for output in (first, second, third)] == [[[None]]] * 3


def test_sets_of_some_requests_arrive_with_those_requests() -> None:
    """SGLang 0.5.12 sends, for each key, a list with only the requests that have it."""
    reqs = [request() for _ in range(4)]
    ours = SetBuffer()
    ours.append((b"abcd", b"efgh"), "7")
    reqs[1].customized_info = {KEY: ours, "theirs": [1]}
    host_copy_before_0_5_19.commit(None, reqs)
    assert [len(req.customized_info[KEY][0:1]) for req in reqs] == [0, 1, 0, 0]
    assert "theirs" not in reqs[0].customized_info


def test_requests_without_sets_stay_as_they_are() -> None:
    reqs = [request(), request()]
    reqs[1].customized_info = {"theirs": [1]}
    host_copy_before_0_5_19.commit(None, reqs)
    assert [req.customized_info for req in reqs] == [None, {"theirs": [1]}]
