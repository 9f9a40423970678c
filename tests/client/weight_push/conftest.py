"""Servers with SGLang's routes for weight pushes."""

import contextlib

import pytest

from sglang_topp_client import AsyncRolloutClient

TENSORS = "/sglang_topp/checkpoint_tensors"
INFO = {"model_path": "m", "tp_size": 1, "dp_size": 1, "pp_size": 1, "sglang_topp": {"is_paused": False}}


@pytest.fixture
def start_engines(fakes):
    """Return a function that starts one server per tensor-parallel size, which accepts everything.

    The first route that the function takes is the one that updates the weights. `tensors` has the shapes of
    every checkpoint's tensors, by name.
    """

    async def accept(asked, reply):
        await reply.json({"success": True, "message": "fine"})

    async def flush(asked, reply):
        await reply.start(content_type="text/plain")
        await reply.write(b"Cache flushed.\n")
        await reply.end()

    with contextlib.ExitStack() as stack:

        def start(update, *routes, tp_sizes, tensors):
            servers = []

            async def checkpoint(asked, reply):
                await reply.json({"tensors": tensors, "optional": []})

            for tp_size in tp_sizes:

                async def info(asked, reply, tp_size=tp_size):
                    await reply.json(INFO | {"tp_size": tp_size})

                paths = {"/server_info": info, "/flush_cache": flush, TENSORS: checkpoint}
                paths |= dict.fromkeys((update, *routes), accept)
                servers.append(fakes.FakeServer(update, paths))
                servers[-1].url = stack.enter_context(fakes.Uvicorn(servers[-1].app))
            return servers

        yield start


@pytest.fixture
async def client(engines):
    async with AsyncRolloutClient([engine.url for engine in engines]) as client:
        yield client
