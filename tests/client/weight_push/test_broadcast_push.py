"""`push_weights(via="distributed")`: the group over gloo, the requests of engines, and engines that fail."""

import asyncio
import json
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributed

from sglang_topp.errors import BadRequestError, InvalidInputError, WeightPushError
from sglang_topp_client.weight_push import broadcast_push, tensors_to_push
from tests.client.weight_push.conftest import TENSORS

pytestmark = pytest.mark.usefixtures("no_leftovers")

PAUSE, FLUSH, CONTINUE = "/pause_generation", "/flush_cache", "/continue_generation"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
JOIN, UPDATE, LEAVE = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
WEIGHTS = [(f"layers.{i}.weight", torch.arange(12.0).view(3, 4).to(torch.bfloat16) + i) for i in range(3)]

# Joins the group as SGLang's ranks do, within a default group of its own, and prints what it receives.
RANK = """
import json, sys
import torch
from datetime import timedelta
from torch import distributed
from torch.distributed import distributed_c10d as c10d

port, rank, world_size, name, counts = json.loads(sys.argv[1])
limit = timedelta(seconds=120)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=limit))
group, _ = c10d._new_process_group_helper(
    world_size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=limit
)
c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
for _ in range(counts):
    values = torch.empty(3, 4, dtype=torch.bfloat16)
    distributed.broadcast(values, src=0, group=group)
    print(json.dumps(values.tolist()), flush=True)
"""


@pytest.fixture
def engines(start_engines):
    """Two servers, of which the second has two ranks."""
    tensors = {name: list(tensor.shape) for name, tensor in WEIGHTS}
    return start_engines(UPDATE, PAUSE, CONTINUE, BEGIN, JOIN, LEAVE, END, tp_sizes=(1, 2), tensors=tensors)


@pytest.fixture
def no_group(monkeypatch):
    """Leave out the collective operations of this process, and do not wait for them."""
    monkeypatch.setattr(broadcast_push._Group, "_join", lambda *_: None)
    monkeypatch.setattr(broadcast_push._Group, "_send", lambda *_: None)


def steps(engine):
    return [asked.path for asked in engine.asked]


async def refuse(asked, reply):
    await reply.json({"success": False, "message": "not today"}, 400)


@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "beside-a-default-group"])
async def test_every_rank_receives_the_tensors(engines, client, monkeypatch, has_group):
    """The ranks are processes without SGLang, which the fakes start."""
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 50)  # two tensors
    ranks = []
    accept = engines[0].paths[JOIN]

    def start(body, tp_size):
        for rank in range(body["rank_offset"], body["rank_offset"] + tp_size):
            order = [body["master_port"], rank, body["world_size"], body["group_name"], len(WEIGHTS)]
            command = [sys.executable, "-c", RANK, json.dumps(order)]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    for engine, tp_size in zip(engines, (1, 2), strict=True):

        async def join(asked, reply, tp_size=tp_size):
            await asyncio.to_thread(start, asked.body, tp_size)
            await accept(asked, reply)

        engine.paths[JOIN] = join
    if has_group:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        await client.push_weights(WEIGHTS, version="8", via="distributed", timeout_s=120)
        received = [await asyncio.to_thread(process.communicate) for process in ranks]
        assert distributed.is_initialized() == has_group
    finally:
        if has_group:
            distributed.destroy_process_group()
        for process in ranks:
            process.kill()
            process.wait()
    assert len(received) == 3
    expected = [str(tensor.tolist()) for _, tensor in WEIGHTS]
    for output, _ in received:
        assert output.splitlines() == expected
    for engine in engines:
        assert steps(engine) == [
            *("/server_info", TENSORS, PAUSE, FLUSH, BEGIN),
            *(JOIN, UPDATE, UPDATE, LEAVE, END, FLUSH, CONTINUE),
        ]
        first, last = engine.calls
        assert first["names"] + last["names"] == [name for name, _ in WEIGHTS]
        assert first["shapes"] == [[3, 4]] * 2
        assert set(first["dtypes"] + last["dtypes"]) == {"bfloat16"}
        assert [first["weight_version"], last["weight_version"]] == [None, "8"]
        (joined,) = engine.of(JOIN)
        assert (joined.body["backend"], joined.body["world_size"]) == ("gloo", 4)
        assert engine.of(LEAVE)[0].body == {"group_name": joined.body["group_name"]}
    assert [engine.of(JOIN)[0].body["rank_offset"] for engine in engines] == [1, 2]


@pytest.mark.parametrize("path", [JOIN, UPDATE])
async def test_if_an_engine_fails_no_engines_weights_are_known(engines, client, no_group, path):
    accept = engines[1].paths[path]
    engines[1].paths[path] = refuse
    with pytest.raises(WeightPushError, match="reached 0 of 2 engines") as failed:
        await client.push_weights(WEIGHTS, version="8", via="distributed")
    assert failed.value.weight_versions == {engine.url: None for engine in engines}
    assert "not today" in str(failed.value)
    assert "another engine failed" in str(failed.value)
    assert not any(engine.of(END) or engine.of(CONTINUE) for engine in engines)
    engines[1].paths[path] = accept
    await client.push_weights(WEIGHTS, version="9", via="distributed")
    assert all(engine.of(CONTINUE) for engine in engines)


async def test_an_engine_that_does_not_begin_stops_the_push(engines, client, no_group):
    engines[1].paths[BEGIN] = refuse
    with pytest.raises(BadRequestError, match="not today"):
        await client.push_weights(WEIGHTS, version="8", via="distributed")
    assert not any(engine.of(JOIN) for engine in engines)
    assert all(engine.of(CONTINUE) for engine in engines)


async def test_a_refusal_is_reported_before_the_collective_operation_ends(engines, client, monkeypatch):
    """The other ranks would wait for the engine that refused, until their own time limit."""
    monkeypatch.setattr(broadcast_push, "_GRACE_S", 0.1)
    engines[1].paths[JOIN] = refuse
    with pytest.raises(WeightPushError, match="not today"):
        await client.push_weights(WEIGHTS, version="8", via="distributed", timeout_s=3)
    (thread,) = [each for each in threading.enumerate() if each.name == "sglang-topp-broadcast"]
    await asyncio.to_thread(thread.join)


async def test_a_broadcast_that_fails_here_is_a_failed_push(engines, client, no_group, monkeypatch):
    def fail(*_):
        raise RuntimeError("the link is down")

    monkeypatch.setattr(broadcast_push._Group, "_send", fail)
    with pytest.raises(WeightPushError, match="the broadcast of the weights failed: the link is down"):
        await client.push_weights(WEIGHTS, version="8", via="distributed")
    assert not any(engine.of(CONTINUE) for engine in engines)


@pytest.mark.parametrize("weights", ["/weights/8", [("a", 1.0)], []])
async def test_wrong_weights_are_refused(engines, client, no_group, weights):
    with pytest.raises(InvalidInputError, match=r"^weights: got"):
        await client.push_weights(weights, version="8", via="distributed")
    assert not any(engine.asked for engine in engines)


async def test_a_wrong_tensor_after_others_is_a_failed_push(engines, client, no_group, monkeypatch):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    with pytest.raises(WeightPushError, match=r"weights: got an entry \('b', 1\)"):
        await client.push_weights(iter([*WEIGHTS, ("b", 1)]), version="8", via="distributed")
    assert len(engines[0].calls) == 2
    assert not any(engine.of(CONTINUE) for engine in engines)


def test_the_own_address_is_the_one_that_engines_see():
    assert broadcast_push._own_address(["http://127.0.0.1:30000", "http://localhost:1"]) == "127.0.0.1"
