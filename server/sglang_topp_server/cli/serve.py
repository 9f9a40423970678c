"""`sglang-topp serve`: start a patched SGLang and the sidecar; `sglang-topp sidecar`: only the sidecar."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from sglang_topp_server.cli.common import (
    SIDECAR_KEY,
    USAGE,
    Commands,
    add_command,
    count,
    count_or_zero,
    fail,
    port,
    read_key,
    seconds,
)
from sglang_topp_server.process.sglang_with_env_key import KEY_VARIABLE as ENGINE_KEY
from sglang_topp_server.settings import Limits, Settings

_PLUGIN = "sglang_topp"
_OURS = {
    "--model-path": "--model-path before the --",
    "--model": "--model-path before the --",
    "--host": "--engine-host before the --",
    "--port": "--engine-port before the --",
    "--api-key": f"the environment variable {ENGINE_KEY}",
}
_KEYS_NOTE = (
    f"Keys come from the environment: callers must send {SIDECAR_KEY}, and {ENGINE_KEY} is the engine's key."
)
_MAX_FILES = 1 << 16


def add_parsers(commands: Commands) -> None:
    """Add both commands. `main` stores the arguments for SGLang, which follow `--`, in `args.sglang_args`."""
    serve = add_command(
        commands,
        "serve",
        "start a patched SGLang and the sidecar",
        _serve,
        usage="sglang-topp serve --model-path MODEL [options] [-- any SGLang arguments]",
        details="It prints one line when both are ready. Both stop on SIGINT or SIGTERM, or when"
        f" either ends. {_KEYS_NOTE}",
        examples=[
            "sglang-topp serve --model-path Qwen/Qwen3-0.6B",
            "sglang-topp serve --model-path /models/qwen --host 0.0.0.0 -- --tp-size 2",
            "SGLANG_TOPP_API_KEY=secret sglang-topp serve --model-path /models/qwen --view 100",
        ],
    )
    serve.set_defaults(takes_sglang_args=True)
    serve.add_argument("--model-path", required=True, help="the model: a path or a name that SGLang accepts")
    serve.add_argument("--engine-host", default="127.0.0.1", help="SGLang's listen address (%(default)s)")
    serve.add_argument("--engine-port", type=port, default=30000, help="SGLang's port (%(default)s; 0: free)")
    sidecar = add_command(
        commands,
        "sidecar",
        "start only the sidecar, for a patched SGLang that runs",
        _sidecar,
        details="The engine may be a gateway in front of patched servers. SIGINT or SIGTERM stops the"
        f" sidecar. {_KEYS_NOTE}",
        examples=[
            "sglang-topp sidecar --engine-url http://127.0.0.1:30000",
            "sglang-topp sidecar --engine-url http://gateway:30000 --host 0.0.0.0 --max-in-flight 16384",
        ],
    )
    sidecar.add_argument("--engine-url", required=True, help="the engine's address, http://host:port")
    for parser in (serve, sidecar):
        for option in (*fields(Settings), *fields(Limits)):
            is_of_serve = option.name == "ready_timeout_s"
            if "help" in option.metadata and not (is_of_serve and parser is sidecar):
                parser.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    type=_kind(option.name, option.default),
                    default=option.default,
                    help=f"{option.metadata['help']} (%(default)s)",
                )


def _kind(name: str, default: Any) -> Callable[[str], Any]:
    """Return the type of an option's argument."""
    if isinstance(default, str):
        return str
    return port if name == "port" else seconds if name.endswith("_s") else count if default else count_or_zero


def _serve(args: argparse.Namespace) -> int:
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
    from sglang_topp_patches.capabilities import environment_problems
    from sglang_topp_server.process import launch

    for reason in environment_problems():
        return fail(f"candidate sets cannot be served: {reason}", USAGE)
    engine_port = launch.check_free(args.engine_host, args.engine_port)
    if (args.host, args.port) == (args.engine_host, engine_port):
        return fail(
            f"--port and --engine-port: got {engine_port} for both, expected two different ports", USAGE
        )
    settings = _settings(args, launch.url_of(args.engine_host, engine_port))
    if settings.engine_api_key is not None and _has_http_workers(args.sglang_args):
        return fail(f"SGLang takes no key with several HTTP workers: unset {ENGINE_KEY}", USAGE)
    command = launch.engine_command(args.model_path, args.engine_host, engine_port, args.sglang_args)
    return _run(settings, command)


def _sidecar(args: argparse.Namespace) -> int:
    return _run(_settings(args, args.engine_url))


def _run(settings: Settings, command: Sequence[str] | None = None) -> int:
    import uvloop

    from sglang_topp_server.process import launch

    # Each request in flight holds two sockets.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MAX_FILES), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(launch.run(settings, command))
    return 0


def _settings(args: argparse.Namespace, engine_url: str) -> Settings:
    given = vars(args) | {
        "engine_url": engine_url,
        "api_key": read_key(SIDECAR_KEY),
        "engine_api_key": read_key(ENGINE_KEY),
        "limits": Limits(**{one.name: getattr(args, one.name) for one in fields(Limits)}),
    }
    return Settings(**{one.name: given[one.name] for one in fields(Settings) if one.name in given})


def _has_http_workers(sglang_args: Sequence[str]) -> bool:
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--tokenizer-worker-num", default="1")
    return bool(option.parse_known_args(sglang_args)[0].tokenizer_worker_num != "1")
