"""Servers with SGLang's routes for weight pushes."""

import pytest

from sglang_topp_client import AsyncRolloutClient
from tests.client.conftest import answers, sends_bytes

PAUSE, FLUSH, CONTINUE = "/pause_generation", "/flush_cache", "/continue_generation"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
TENSORS = "/sglang_topp/checkpoint_tensors"
INFO = {"model_path": "m", "tp_size": 1, "dp_size": 1, "pp_size": 1, "sglang_topp": {"is_paused": False}}

accept = answers({"success": True, "message": "fine"})
refuse = answers({"success": False, "message": "not today"}, 400)


def steps(engine):
    return [asked.path for asked in engine.asked]


def holds(tensors):
    """Make a handler that answers with the shapes of a checkpoint's tensors, by name."""
    return answers({"tensors": tensors, "optional": []})


@pytest.fixture
def start_engines(start_servers):
    """Return a function that starts one server per tensor-parallel size, which accepts everything.

    The first route that the function takes is the one that updates the weights.
    """

    def start(update, *routes, tp_sizes, tensors):
        paths = dict.fromkeys((update, PAUSE, CONTINUE, *routes), accept)
        paths |= {FLUSH: sends_bytes(b"Cache flushed.\n", "text/plain"), TENSORS: holds(tensors)}
        servers = start_servers(len(tp_sizes), paths)
        for server, tp_size in zip(servers, tp_sizes, strict=True):
            server.paths["/server_info"] = answers(INFO | {"tp_size": tp_size})
        return servers

    return start


@pytest.fixture
async def client(engines):
    async with AsyncRolloutClient([engine.url for engine in engines]) as client:
        yield client
