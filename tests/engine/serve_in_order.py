"""Run SGLang's server as programs do that import parts of SGLang before its plugins are loaded.

    python -m tests.engine.serve_in_order ORDER ARGUMENTS

| order | what happens | as in |
|---|---|---|
| spawned | imports the HTTP server, then runs `launch_server` in a spawned process | slime |
| called | imports the HTTP server, then calls `launch_server` | notebooks |
| engine_first | makes an `Engine`, then imports the HTTP server's application and serves it | own servers |
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")
if os.environ.get("SGLANG_PLATFORM") == "sglang_topp_cpu":
    from tests.engine.sglang_forks.sitecustomize import fork_instead_of_spawn

    fork_instead_of_spawn()  # SGLang's other processes need not import it again


def main(order: str, *arguments: str) -> None:
    if order == "engine_first":
        serve_engine([*arguments])
        return
    from sglang.srt.entrypoints.http_server import launch_server

    server_args = parse(arguments)
    if order == "called":
        launch_server(server_args)
        return
    process = _SPAWN.Process(target=launch_server, args=(server_args,))
    process.start()
    process.join()


def serve_engine(arguments: list[str]) -> None:
    import uvicorn
    from sglang.srt.entrypoints.engine import Engine

    server_args = parse(arguments)
    engine = Engine(server_args=server_args)
    assert "sglang.srt.entrypoints.http_server" not in sys.modules
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    manager = engine.tokenizer_manager
    manager.server_status = ServerStatus.Up
    http_server.set_global_state(http_server._GlobalState(manager, engine.template_manager, {}))
    uvicorn.run(http_server.app, host=server_args.host, port=server_args.port, lifespan="off")


def parse(arguments: Any) -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_topp_patches.releases import installed

    if installed()[0] < "0.5.14":
        load_plugins()  # these releases find the CPU with our platform alone; the HTTP server came before it
    return prepare_server_args([*arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
