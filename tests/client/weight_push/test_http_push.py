"""`push_weights(via="tensor")`: the requests of each engine, and what becomes of engines that fail."""

import base64
import io
import pickle
import re

import pytest
import torch

from sglang_topp.errors import BadRequestError, InvalidInputError, WeightPushError, WireError
from sglang_topp_client import RolloutClient
from sglang_topp_client.weight_push import tensors_to_push
from tests.client.weight_push.conftest import INFO, TENSORS

pytestmark = pytest.mark.usefixtures("no_leftovers")

PAUSE, FLUSH, CONTINUE = "/pause_generation", "/flush_cache", "/continue_generation"
BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
WEIGHTS = [(f"layers.{i}.weight", torch.arange(12.0).view(3, 4) + i) for i in range(3)]


@pytest.fixture
def engines(start_engines):
    """Two servers, of which the second has two ranks."""
    tensors = {name: list(tensor.shape) for name, tensor in WEIGHTS}
    return start_engines(UPDATE, PAUSE, CONTINUE, BEGIN, END, tp_sizes=(1, 2), tensors=tensors)


def steps(engine):
    return [asked.path for asked in engine.asked]


async def refuse(asked, reply):
    await reply.json({"success": False, "message": "not today"}, 400)


async def absent(asked, reply):
    await reply.json({"detail": "Not Found"}, 404)


def holding(tensors):
    async def checkpoint(asked, reply):
        await reply.json({"tensors": tensors, "optional": []})

    return checkpoint


def received(engine):
    """The tensors that reached each rank of an engine."""
    ranks = []
    for body in engine.calls:
        for rank, encoded in enumerate(body["serialized_named_tensors"]):
            ranks.extend([{}] if rank == len(ranks) else [])
            ranks[rank].update(pickle.loads(base64.b64decode(encoded)))
    return ranks


async def test_every_rank_of_every_engine_gets_all_tensors_in_order(engines, client, monkeypatch):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 100)  # two tensors
    await client.push_weights(WEIGHTS, version="8", via="tensor")
    for engine, num_ranks in zip(engines, (1, 2), strict=True):
        assert steps(engine) == [
            *("/server_info", TENSORS, PAUSE, FLUSH, BEGIN, UPDATE, UPDATE, END, FLUSH, CONTINUE),
        ]
        assert [body["weight_version"] for body in engine.calls] == [None, "8"]
        assert not any(body["flush_cache"] for body in engine.calls)
        ranks = received(engine)
        assert len(ranks) == num_ranks
        for rank in ranks:
            assert list(rank) == [name for name, _ in WEIGHTS]
            assert all(torch.equal(rank[name], tensor) for name, tensor in WEIGHTS)


async def test_releases_without_sessions_get_none(engines, client):
    for engine in engines:
        engine.paths[BEGIN] = engine.paths[END] = absent
    await client.push_weights(dict(WEIGHTS), version="8", via="tensor")
    assert steps(engines[0]) == ["/server_info", TENSORS, PAUSE, FLUSH, BEGIN, UPDATE, FLUSH, CONTINUE]


async def test_a_session_that_was_left_open_is_ended_first(engines, client):
    accept = engines[0].paths[BEGIN]

    async def is_open(asked, reply):
        await (accept if engines[0].of(END) else refuse)(asked, reply)

    engines[0].paths[BEGIN] = is_open
    await client.push_weights(WEIGHTS, version="8", via="tensor")
    assert steps(engines[0]) == [
        *("/server_info", TENSORS, PAUSE, FLUSH, BEGIN, END, BEGIN, UPDATE, END, FLUSH, CONTINUE),
    ]


async def test_engines_continue_if_one_does_not_begin(engines, client):
    engines[1].paths[BEGIN] = refuse
    with pytest.raises(BadRequestError, match="not today") as failed:
        await client.push_weights(WEIGHTS, version="8", via="tensor")
    assert failed.value.__notes__ == ["no weights were loaded; all engines continue"]
    assert steps(engines[0]) == ["/server_info", TENSORS, PAUSE, FLUSH, BEGIN, END, CONTINUE]
    assert engines[1].of(CONTINUE)


@pytest.mark.parametrize("path", [UPDATE, END])
async def test_an_engine_that_fails_leaves_all_paused(engines, client, monkeypatch, path):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    accept = engines[1].paths[path]
    engines[1].paths[path] = refuse
    with pytest.raises(WeightPushError, match="reached 1 of 2 engines") as failed:
        await client.push_weights(WEIGHTS, version="8", via="tensor")
    assert failed.value.weight_versions == {engines[0].url: "8", engines[1].url: None}
    assert "not today" in str(failed.value)
    assert [len(engine.calls) for engine in engines] == [3, {UPDATE: 1, END: 3}[path]]
    assert not any(engine.of(CONTINUE) for engine in engines)
    engines[1].paths[path] = accept
    await client.push_weights(WEIGHTS, version="9", via="tensor")
    assert all(engine.of(CONTINUE) for engine in engines)


@pytest.mark.parametrize("name", ["dp_size", "pp_size"])
async def test_engines_whose_ranks_cannot_be_reached_are_refused_before_any_pause(engines, client, name):
    async def info(asked, reply):
        await reply.json(INFO | {name: 2})

    engines[1].paths["/server_info"] = info
    with pytest.raises(InvalidInputError, match=f"via: got 'tensor', but {engines[1].url} has {name} 2"):
        await client.push_weights(WEIGHTS, version="8", via="tensor")
    assert not any(engine.of(PAUSE) for engine in engines)


async def test_an_engine_that_does_not_name_its_ranks_is_an_error(engines, client):
    async def info(asked, reply):
        await reply.json({name: value for name, value in INFO.items() if name != "tp_size"})

    engines[0].paths["/server_info"] = info
    with pytest.raises(WireError, match="tp_size: got None in /server_info"):
        await client.push_weights(WEIGHTS, version="8", via="tensor")
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
async def test_wrong_weights_are_refused_before_any_pause(engines, client, weights, message):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        await client.push_weights(weights, version="8", via="tensor")
    assert not any(engine.asked for engine in engines)


async def test_a_wrong_tensor_after_others_is_a_failed_push(engines, client, monkeypatch):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    with pytest.raises(WeightPushError, match=r"weights: got an entry \('b', 1\)") as failed:
        await client.push_weights(iter([*WEIGHTS, ("b", 1)]), version="8", via="tensor")
    assert set(failed.value.weight_versions.values()) == {None}
    assert len(engines[0].calls) == 2
    assert not any(engine.of(CONTINUE) for engine in engines)


def test_the_synchronous_client_reads_a_generator_bucket_by_bucket(engines, monkeypatch):
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    num_sent = []

    def generate():
        for name, tensor in WEIGHTS:
            num_sent.append(len(engines[0].calls))
            yield name, tensor

    with RolloutClient([engine.url for engine in engines]) as client:
        client.push_weights(generate(), version="8", via="tensor")
    assert num_sent == [0, 0, 1]
    assert [list(rank) for rank in received(engines[0])] == [[name for name, _ in WEIGHTS]]


async def test_a_view_is_sent_without_its_storage(engines, client):
    large = torch.zeros(1 << 20)
    engines[0].paths[TENSORS] = engines[1].paths[TENSORS] = holding({"a": [2], "b": [2, 1024]})
    weights = [("a", large[3:5]), ("b", large.view(1024, 1024).T[:2])]
    await client.push_weights(weights, version="8", via="tensor")
    (body,) = engines[0].calls
    assert len(body["serialized_named_tensors"][0]) < 20_000
    (rank,) = received(engines[0])
    assert rank["b"].shape == (2, 1024)
    assert rank["b"].is_contiguous()


async def test_pickles_hold_plain_tensors_alone(engines, client):
    """SGLang's unpickler takes few names, none of them of this project."""
    names = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            names.add((module, name))
            return super().find_class(module, name)

    engines[0].paths[TENSORS] = engines[1].paths[TENSORS] = holding({"a": [2]})
    await client.push_weights([("a", torch.nn.Parameter(torch.ones(2)))], version="8", via="tensor")
    Unpickler(io.BytesIO(base64.b64decode(engines[0].calls[0]["serialized_named_tensors"][0]))).load()
    assert names == {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
    }
