"""`sglang-topp sidecar`: start only the sidecar, for a patched SGLang that is already running."""

from __future__ import annotations

import argparse
import asyncio

from sglang_topp_server.cli.common import add_command
from sglang_topp_server.cli.sidecar_options import (
    KEYS_NOTE,
    add_sidecar_options,
    raise_file_limit,
    settings_of,
)

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "sidecar",
        "start only the sidecar, for a patched SGLang that runs",
        details="The engine may be a gateway in front of patched servers. SIGINT or SIGTERM stops the"
        " sidecar.",
        notes=KEYS_NOTE,
        examples=[
            "sglang-topp sidecar --engine-url http://127.0.0.1:30000",
            "sglang-topp sidecar --engine-url http://gateway:30000 --host 0.0.0.0 --max-in-flight 16384",
        ],
    )
    parser.add_argument("--engine-url", required=True, help="the engine's address, http://host:port")
    add_sidecar_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from sglang_topp_server.process import launch

    raise_file_limit()
    asyncio.run(launch.run(settings_of(args, args.engine_url)))
    return 0
