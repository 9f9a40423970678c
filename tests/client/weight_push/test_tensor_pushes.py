"""Pushes of tensors, over HTTP or by broadcast: the requests of each engine, and engines that fail."""

import asyncio
import base64
import io
import json
import pickle
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributed

from sglang_topp.errors import BadRequestError, InvalidInputError, WeightPushError, WireError
from sglang_topp_client import RolloutClient
from sglang_topp_client.weight_push import broadcast_push, tensors_to_push
from tests.client.conftest import answers, by_request
from tests.client.weight_push import conftest as push
from tests.client.weight_push.conftest import BEGIN, CONTINUE, END, FLUSH, PAUSE, TENSORS, refuse, steps

pytestmark = pytest.mark.usefixtures("no_leftovers")

UPDATE = {"tensor": "/update_weights_from_tensor", "distributed": "/update_weights_from_distributed"}
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
WEIGHTS = [(f"layers.{i}.weight", torch.arange(12.0).view(3, 4).to(torch.bfloat16) + i) for i in range(3)]


@pytest.fixture(params=["tensor", "distributed"])
def via(request, monkeypatch):
    """How the weights are pushed. This process leaves out its collective operations, and does not wait."""
    monkeypatch.setattr(broadcast_push._Group, "_join", lambda *_: None)
    monkeypatch.setattr(broadcast_push._Group, "_send", lambda *_: None)
    return request.param


@pytest.fixture
def engines(start_engines, via):
    """Two servers, of which the second has two ranks."""
    tensors = {name: list(tensor.shape) for name, tensor in WEIGHTS}
    return start_engines(UPDATE[via], BEGIN, JOIN, LEAVE, END, tp_sizes=(1, 2), tensors=tensors)


over_http = pytest.mark.parametrize("via", ["tensor"])
by_broadcast = pytest.mark.parametrize("via", ["distributed"], indirect=True)


def received(engine):
    """The tensors that reached each rank of an engine."""
    ranks = []
    for body in engine.calls:
        for rank, encoded in enumerate(body["serialized_named_tensors"]):
            ranks.extend([{}] if rank == len(ranks) else [])
            ranks[rank].update(pickle.loads(base64.b64decode(encoded)))
    return ranks


@over_http
async def test_every_rank_of_every_engine_gets_all_tensors_in_order(engines, client, monkeypatch, via):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 50)  # two tensors
    await client.push_weights(WEIGHTS, version="8", via=via)
    updates = [UPDATE[via]] * 2
    for engine, num_ranks in zip(engines, (1, 2), strict=True):
        assert steps(engine) == ["/server_info", TENSORS, PAUSE, FLUSH, BEGIN, *updates, END, FLUSH, CONTINUE]
        assert [body["weight_version"] for body in engine.calls] == [None, "8"]
        assert not any(body["flush_cache"] for body in engine.calls)
        ranks = received(engine)
        assert len(ranks) == num_ranks
        for rank in ranks:
            assert list(rank) == [name for name, _ in WEIGHTS]
            assert all(torch.equal(rank[name], tensor) for name, tensor in WEIGHTS)


@over_http
async def test_releases_without_sessions_get_none(engines, client, via):
    for engine in engines:
        del engine.paths[BEGIN], engine.paths[END]
    await client.push_weights(dict(WEIGHTS), version="8", via=via)
    assert steps(engines[0]) == ["/server_info", TENSORS, PAUSE, FLUSH, BEGIN, UPDATE[via], FLUSH, CONTINUE]


@over_http
async def test_a_session_that_was_left_open_is_ended_first(engines, client, via):
    engines[0].paths[BEGIN] = by_request(lambda _: push.accept if engines[0].of(END) else refuse)
    await client.push_weights(WEIGHTS, version="8", via=via)
    assert steps(engines[0])[4:9] == [BEGIN, END, BEGIN, UPDATE[via], END]
    assert steps(engines[0])[9:] == [FLUSH, CONTINUE]


async def test_engines_continue_if_one_does_not_begin(engines, client, via):
    engines[1].paths[BEGIN] = refuse
    with pytest.raises(BadRequestError, match="not today") as failed:
        await client.push_weights(WEIGHTS, version="8", via=via)
    assert failed.value.__notes__ == ["no weights were loaded; all engines continue"]
    assert steps(engines[0]) == ["/server_info", TENSORS, PAUSE, FLUSH, BEGIN, END, CONTINUE]
    assert engines[1].of(CONTINUE)


@pytest.mark.parametrize(
    ("via", "path", "counts"),
    [
        ("tensor", UPDATE["tensor"], [3, 1]),
        ("tensor", END, [3, 3]),
        ("distributed", UPDATE["distributed"], [1, 1]),
        ("distributed", JOIN, [0, 0]),
    ],
    indirect=["via"],
)
async def test_an_engine_that_fails_leaves_all_paused(engines, client, monkeypatch, via, path, counts):
    """A broadcast that fails on one engine reaches none."""
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    accept = engines[1].paths[path]
    engines[1].paths[path] = refuse
    reached, message = (None, "reached 0 of 2") if via == "distributed" else ("8", "reached 1 of 2")
    with pytest.raises(WeightPushError, match=f"{message} engines") as failed:
        await client.push_weights(WEIGHTS, version="8", via=via)
    assert failed.value.weight_versions == {engines[0].url: reached, engines[1].url: None}
    assert "not today" in str(failed.value)
    assert ("another engine failed" in str(failed.value)) == (via == "distributed")
    assert [len(engine.calls) for engine in engines] == counts
    assert not any(engine.of(CONTINUE) for engine in engines)
    assert not (via == "distributed" and any(engine.of(END) for engine in engines))
    engines[1].paths[path] = accept
    await client.push_weights(WEIGHTS, version="9", via=via)
    assert all(engine.of(CONTINUE) for engine in engines)


@over_http
async def test_no_more_is_sent_once_every_engine_has_failed(engines, client, monkeypatch, via):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    engines[0].paths[UPDATE[via]] = engines[1].paths[UPDATE[via]] = refuse
    pairs = iter(WEIGHTS)
    with pytest.raises(WeightPushError, match="reached 0 of 2"):
        await client.push_weights(pairs, version="8", via=via)
    assert next(pairs, None) is not None


@over_http
@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("dp_size", 2, InvalidInputError, "via: got 'tensor', but {} has dp_size 2"),
        ("pp_size", 2, InvalidInputError, "via: got 'tensor', but {} has pp_size 2"),
        ("tp_size", None, WireError, "tp_size: got None in /server_info"),
    ],
)
async def test_engines_whose_ranks_cannot_be_reached_are_refused_before_any_pause(
    engines, client, via, name, value, kind, words
):
    engines[1].paths["/server_info"] = answers({n: v for n, v in (push.INFO | {name: value}).items() if v})
    with pytest.raises(kind, match=words.format(engines[1].url)):
        await client.push_weights(WEIGHTS, version="8", via=via)
    assert not any(engine.of(PAUSE) for engine in engines)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("/weights/8", "weights: got '/weights/8', expected a transformers model or"),
        (5, "weights: got 5, expected a transformers model"),
        ([], "weights: got no tensors"),
        ([("a", 1.0)], "weights: got an entry ('a', 1.0), expected pairs of a name and a tensor"),
        ([torch.ones(2)], "weights: got an entry tensor([1., 1.]), expected pairs"),
        ([(1, torch.ones(2))], "weights: got an entry (1, tensor([1., 1.]))"),
        ([("a", torch.ones(2, device="meta"))], "weights: a is on the meta device"),
    ],
)
async def test_wrong_weights_are_refused_before_any_pause(engines, client, via, weights, message):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        await client.push_weights(weights, version="8", via=via)
    assert not any(engine.asked for engine in engines)


@over_http
def test_the_synchronous_client_reads_a_generator_bucket_by_bucket(engines, monkeypatch, via):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    num_sent = []

    def generate():
        for name, tensor in WEIGHTS:
            num_sent.append(len(engines[0].calls))
            yield name, tensor

    with RolloutClient([engine.url for engine in engines]) as client:
        client.push_weights(generate(), version="8", via=via)
    assert num_sent == [0, 0, 1]
    assert [list(rank) for rank in received(engines[0])] == [[name for name, _ in WEIGHTS]]


@over_http
async def test_a_view_is_sent_without_its_storage(engines, client, via):
    large = torch.zeros(1 << 20)
    engines[0].paths[TENSORS] = engines[1].paths[TENSORS] = push.holds({"a": [2], "b": [2, 1024]})
    weights = [("a", large[3:5]), ("b", large.view(1024, 1024).T[:2])]
    await client.push_weights(weights, version="8", via=via)
    (body,) = engines[0].calls
    assert len(body["serialized_named_tensors"][0]) < 20_000
    (rank,) = received(engines[0])
    assert rank["b"].shape == (2, 1024)
    assert rank["b"].is_contiguous()


@over_http
async def test_pickles_hold_plain_tensors_alone(engines, client, via):
    """SGLang's unpickler takes few names, none of them of this project."""
    names = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            names.add((module, name))
            return super().find_class(module, name)

    engines[0].paths[TENSORS] = engines[1].paths[TENSORS] = push.holds({"a": [2]})
    await client.push_weights([("a", torch.nn.Parameter(torch.ones(2)))], version="8", via=via)
    Unpickler(io.BytesIO(base64.b64decode(engines[0].calls[0]["serialized_named_tensors"][0]))).load()
    assert names == {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
    }


# -- by broadcast ----------------------------------------------------------------------------------

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


@pytest.mark.parametrize("via", ["distributed"])
@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "beside-a-default-group"])
async def test_every_rank_receives_the_tensors(engines, client, monkeypatch, has_group):
    """The ranks are processes without SGLang, which the fakes start."""
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 50)  # two tensors
    ranks = []

    def start(body, tp_size):
        for rank in range(body["rank_offset"], body["rank_offset"] + tp_size):
            order = [body["master_port"], rank, body["world_size"], body["group_name"], len(WEIGHTS)]
            command = [sys.executable, "-c", RANK, json.dumps(order)]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    for engine, tp_size in zip(engines, (1, 2), strict=True):

        async def join(asked, reply, tp_size=tp_size):
            await asyncio.to_thread(start, asked.body, tp_size)
            await push.accept(asked, reply)

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
            *(JOIN, UPDATE["distributed"], UPDATE["distributed"], LEAVE, END, FLUSH, CONTINUE),
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


@pytest.mark.parametrize("via", ["distributed"])
async def test_a_refusal_is_reported_before_the_collective_operation_ends(engines, client, monkeypatch):
    """The other ranks would wait for the engine that refused, until their own time limit."""
    monkeypatch.setattr(broadcast_push, "_GRACE_S", 0.1)
    engines[1].paths[JOIN] = refuse
    with pytest.raises(WeightPushError, match="not today"):
        await client.push_weights(WEIGHTS, version="8", via="distributed", timeout_s=3)
    (thread,) = [each for each in threading.enumerate() if each.name == "sglang-topp-broadcast"]
    await asyncio.to_thread(thread.join)


@by_broadcast
async def test_a_broadcast_that_fails_here_is_a_failed_push(engines, client, monkeypatch):
    def fail(*_):
        raise RuntimeError("the link is down")

    monkeypatch.setattr(broadcast_push._Group, "_send", fail)
    with pytest.raises(WeightPushError, match="the broadcast of the weights failed: the link is down"):
        await client.push_weights(WEIGHTS, version="8", via="distributed")
    assert not any(engine.of(CONTINUE) for engine in engines)


def test_the_own_address_is_the_one_that_engines_see():
    assert broadcast_push._own_address(["http://127.0.0.1:30000", "http://localhost:1"]) == "127.0.0.1"
