"""The command `sglang-topp`.

Only what a subcommand needs is imported, when it runs: `sglang-topp --help` works with the base install.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sglang_topp.errors import InvalidInputError, SglangToppError
from sglang_topp_server.limits import Limits
from sglang_topp_server.start_sglang import KEY_VARIABLE as _ENGINE_KEY

if TYPE_CHECKING:
    from sglang_topp_server.serving import Settings

__all__ = ["main"]

_FAILED, _USAGE = 1, 2
_KEY = "SGLANG_TOPP_API_KEY"
_PLUGIN = "sglang_topp"
_SANITIZE = "SGLANG_SANITIZE_NAN_LOGITS"
_MAX_FILES = 1 << 16
_SERVER_MODULES = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette", "pydantic_core")
_OURS = {
    "--model-path": "--model-path before the --",
    "--model": "--model-path before the --",
    "--host": "--engine-host before the --",
    "--port": "--engine-port before the --",
    "--api-key": f"the environment variable {_ENGINE_KEY}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 where it did what was asked (for `serve` and `sidecar`: ran until a signal), 1 where it failed,
        2 where it could not begin: wrong arguments, or an extra that is not installed.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse would swallow the dashes and take SGLang's options for its own.
    split = given.index("--") if "--" in given else len(given)
    parser = _parser()
    args = parser.parse_args(given[:split])
    args.sglang_args = given[split + 1 :]
    if args.sglang_args and args.run is not _serve:
        parser.error("arguments after -- are SGLang's, and only `serve` starts it")
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except SglangToppError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name == "pyarrow":
            return _fail(str(error), _USAGE)
        if error.name not in _SERVER_MODULES:
            raise
        return _fail(
            f"{error.name} is not installed; this needs the server extra: pip install 'sglang-topp[server]'",
            _USAGE,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-topp", description="Exact top-p candidate sets from SGLang rollouts."
    )
    parser.add_argument("--version", action="version", version=f"sglang-topp {version('sglang-topp')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="start a patched SGLang, and the sidecar beside it",
        usage="sglang-topp serve --model-path MODEL [options] [-- any SGLang arguments]",
        description="Starts the patched SGLang and the sidecar, prints one line when both are ready, and ends"
        " both on SIGINT or SIGTERM, or when either ends.",
    )
    serve.add_argument("--model-path", required=True, help="the model, as SGLang takes it")
    serve.add_argument("--engine-host", default="127.0.0.1", help="where SGLang listens (%(default)s)")
    serve.add_argument("--engine-port", type=_port, default=30000, help="%(default)s; 0: a free one")
    serve.add_argument(
        "--ready-timeout-s", type=_seconds, default=1800.0, help="how long SGLang may take (%(default)g)"
    )
    _add_sidecar_options(serve)
    serve.set_defaults(run=_serve)

    sidecar = commands.add_parser("sidecar", help="start only the sidecar, before a patched SGLang")
    sidecar.add_argument("--engine-url", required=True, help="the engine, http://host:port")
    _add_sidecar_options(sidecar)
    sidecar.set_defaults(run=_sidecar)

    doctor = commands.add_parser("doctor", help="check every seam of the patch set in the installed SGLang")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser(
        "demo", help="make a small model, serve it, and show candidate sets and ratios"
    )
    demo.set_defaults(run=_demo)

    rollouts = commands.add_parser("rollouts", help="sum up a file of rollouts, and check all of it")
    rollouts.add_argument("file", help="what save_rollouts or a RolloutWriter wrote")
    rollouts.set_defaults(run=_rollouts)
    return parser


def _add_sidecar_options(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("--host", default="127.0.0.1", help="where the sidecar listens (%(default)s)")
    parser.add_argument("--port", type=_port, default=30010, help="%(default)s; 0: a free one")
    parser.add_argument(
        "--workers",
        type=_count,
        default=1,
        help="processes that serve there, where one event loop is not enough; --max-in-flight and"
        " --max-held-bytes are of all together, and each has its share (%(default)s)",
    )
    for name, kind, default, what in (
        ("--max-in-flight", _count, limits.max_in_flight, "requests at once; one more gets a 429"),
        ("--max-samples", _count, limits.max_samples, "prompts x n of one request"),
        ("--max-body-bytes", _count, limits.max_body_bytes, "of one request"),
        ("--timeout-s", _seconds, limits.timeout_s, "of one request"),
        (
            "--max-stall-s",
            _seconds,
            limits.max_stall_s,
            "a caller may take for headers, or be behind 64 KiB/s with body or answer; then it is cut off",
        ),
        ("--max-held-bytes", _count, limits.max_held_bytes, "of finished samples that wait for callers"),
        ("--grace-s", _seconds, 20.0, "for requests in flight after a signal, and then for the engine"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{what} (%(default)s)")
    parser.epilog = (
        f"Keys come from the environment: {_KEY} is what callers need, {_ENGINE_KEY} is the engine's own."
    )


def _serve(args: argparse.Namespace) -> int:
    if find_spec("sglang") is None:
        return _fail("SGLang is not installed: pip install 'sglang-topp[server,sglang]'", _USAGE)
    for argument in args.sglang_args:
        if (name := argument.partition("=")[0]) in _OURS:
            return _fail(f"got {name} after the --, expected {_OURS[name]}", _USAGE)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and _PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return _fail(
            f"SGLANG_PLUGINS is {allowed!r}, which leaves the patch set out; add {_PLUGIN} or unset it",
            _USAGE,
        )
    from sglang_topp_patches.mode import environment_refusals
    from sglang_topp_server import launch

    for reason in environment_refusals():
        return _fail(f"candidate sets cannot be served: {reason}", _USAGE)
    port = launch.check_free(args.engine_host, args.engine_port)
    if (args.host, args.port) == (args.engine_host, port):
        return _fail(f"--port and --engine-port: got {port} for both, expected two", _USAGE)
    settings = _settings(args, launch.url_of(args.engine_host, port), ready_timeout_s=args.ready_timeout_s)
    if settings.engine_api_key is not None and _has_http_workers(args.sglang_args):
        return _fail(f"SGLang takes no key with several HTTP workers: unset {_ENGINE_KEY}", _USAGE)
    command = launch.engine_command(args.model_path, args.engine_host, port, args.sglang_args)
    # A grammar that leaves no token to draw would end the scheduler; so an answer ends instead.
    os.environ.setdefault(_SANITIZE, "1")
    _raise_file_limit()
    asyncio.run(launch.run(settings, command))
    return 0


def _has_http_workers(sglang_args: Sequence[str]) -> bool:
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--tokenizer-worker-num", default="1")
    return bool(option.parse_known_args(sglang_args)[0].tokenizer_worker_num != "1")


def _sidecar(args: argparse.Namespace) -> int:
    from sglang_topp_server import launch

    _raise_file_limit()
    asyncio.run(launch.run(_settings(args, args.engine_url)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if find_spec("sglang") is None:
        return _fail(
            "SGLang is not installed, there is nothing to check: pip install 'sglang-topp[sglang]'",
            _USAGE,
        )
    from sglang_topp_patches.doctor import report

    is_whole, lines = report()
    print("\n".join(lines))
    return 0 if is_whole else _FAILED


def _demo(args: argparse.Namespace) -> int:
    from sglang_topp_server.demo import main as run_demo

    return run_demo()


def _rollouts(args: argparse.Namespace) -> int:
    from sglang_topp_server.rollouts import main as summarise

    try:
        summarise(args.file)
    except OSError as error:
        return _fail(str(error))
    return 0


def _settings(args: argparse.Namespace, engine_url: str, **others: float) -> Settings:
    from sglang_topp_server.serving import Settings

    for name in ("max_in_flight", "max_held_bytes"):
        if getattr(args, name) < args.workers:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError(
                f"{option}: got {getattr(args, name)} for {args.workers} workers, expected at least one each"
            )
    return Settings(
        host=args.host,
        port=args.port,
        engine_url=engine_url,
        api_key=_key(_KEY),
        engine_api_key=_key(_ENGINE_KEY),
        limits=Limits(**{one.name: getattr(args, one.name) for one in fields(Limits)}),
        grace_s=args.grace_s,
        workers=args.workers,
        **others,
    )


def _key(name: str) -> str | None:
    key = os.environ.get(name)
    if key is not None and not key.strip():
        raise InvalidInputError(f"{name} is set and empty; unset it to ask for no key")
    if key is not None and key != key.strip():
        raise InvalidInputError(f"{name} begins or ends with white space, which no HTTP header carries")
    return key


def _raise_file_limit() -> None:
    """Every request in flight holds two sockets; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MAX_FILES), hard))


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"got {text}, expected a port from 0 to 65535")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def _fail(message: str, status: int = _FAILED) -> int:
    print(f"sglang-topp: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
