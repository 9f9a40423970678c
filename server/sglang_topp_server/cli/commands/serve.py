"""`sglang-topp serve`: start a patched SGLang and the sidecar."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from importlib.util import find_spec

from sglang_topp_server.cli.common import ENGINE_KEY, USAGE, add_command, fail, port, seconds
from sglang_topp_server.cli.sidecar_options import (
    KEYS_NOTE,
    add_sidecar_options,
    raise_file_limit,
    settings_of,
)

__all__ = ["add_parser"]

_PLUGIN = "sglang_topp"
_CPU_PLATFORM = "sglang_topp_cpu"
_OURS = {
    "--model-path": "--model-path before the --",
    "--model": "--model-path before the --",
    "--host": "--engine-host before the --",
    "--port": "--engine-port before the --",
    "--api-key": f"the environment variable {ENGINE_KEY}",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command. `main` stores the arguments for SGLang, which follow `--`, in `args.sglang_args`."""
    parser = add_command(
        commands,
        "serve",
        "start a patched SGLang and the sidecar",
        usage="sglang-topp serve --model-path MODEL [options] [-- any SGLang arguments]",
        details="It prints one line when both are ready. Both stop on SIGINT or SIGTERM, or when"
        " either ends.",
        notes=KEYS_NOTE,
        examples=[
            "sglang-topp serve --model-path Qwen/Qwen3-0.6B",
            "sglang-topp serve --model-path /models/qwen --host 0.0.0.0 -- --tp-size 2",
            "SGLANG_TOPP_API_KEY=secret sglang-topp serve --model-path /models/qwen --view 100",
        ],
    )
    parser.add_argument("--model-path", required=True, help="the model: a path or a name that SGLang accepts")
    parser.add_argument("--engine-host", default="127.0.0.1", help="SGLang's listen address (%(default)s)")
    parser.add_argument(
        "--engine-port", type=port, default=30000, help="SGLang's port (%(default)s; 0: free)"
    )
    parser.add_argument(
        "--ready-timeout-s",
        type=seconds,
        default=1800.0,
        help="seconds until SGLang must be ready (%(default)g)",
    )
    add_sidecar_options(parser)
    parser.set_defaults(run=_run, takes_sglang_args=True)


def _run(args: argparse.Namespace) -> int:
    if find_spec("sglang") is None:
        return fail("SGLang is not installed: pip install 'sglang-topp[server,sglang]'", USAGE)
    for argument in args.sglang_args:
        if (name := argument.partition("=")[0]) in _OURS:
            return fail(f"got {name} after the --, expected {_OURS[name]}", USAGE)
    path = os.path.expanduser(args.model_path)
    if path.startswith(("/", "./", "../")) and not os.path.exists(path):
        return fail(f"--model-path: {args.model_path} does not exist", USAGE)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and _PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return fail(
            f"SGLANG_PLUGINS is {allowed!r}, which excludes the plugin; add {_PLUGIN} or unset it", USAGE
        )
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform != _CPU_PLATFORM:
        return fail(
            f"SGLANG_PLATFORM is {platform!r}, with which SGLang does not load the plugin; unset it, and"
            " SGLang uses the other installed platform",
            USAGE,
        )
    from sglang_topp_patches.capabilities import environment_problems
    from sglang_topp_server.process import launch

    for reason in environment_problems():
        return fail(f"candidate sets cannot be served: {reason}", USAGE)
    engine_port = launch.check_free(args.engine_host, args.engine_port)
    if (args.host, args.port) == (args.engine_host, engine_port):
        return fail(
            f"--port and --engine-port: got {engine_port} for both, expected two different ports", USAGE
        )
    engine_url = launch.url_of(args.engine_host, engine_port)
    settings = settings_of(args, engine_url, ready_timeout_s=args.ready_timeout_s)
    if settings.engine_api_key is not None and _has_http_workers(args.sglang_args):
        return fail(f"SGLang takes no key with several HTTP workers: unset {ENGINE_KEY}", USAGE)
    command = launch.engine_command(args.model_path, args.engine_host, engine_port, args.sglang_args)
    raise_file_limit()
    asyncio.run(launch.run(settings, command))
    return 0


def _has_http_workers(sglang_args: Sequence[str]) -> bool:
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--tokenizer-worker-num", default="1")
    return bool(option.parse_known_args(sglang_args)[0].tokenizer_worker_num != "1")
