"""`sglang-topp doctor`: check the installed SGLang, or a running server.

The checks of the installed SGLang are in `sglang_topp_patches.plugin`.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from sglang_topp_server.cli.common import FAILED, SIDECAR_KEY, USAGE, Commands, add_command, fail, read_key


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "doctor",
        "check that the installed SGLang, or a running server, returns candidate sets",
        _run,
        details="The exit status is 0 if it does, and 1 otherwise. With --url, the key comes from the"
        f" environment: {SIDECAR_KEY}.",
        examples=[
            "sglang-topp doctor",
            "sglang-topp doctor --url http://127.0.0.1:30010",
            "SGLANG_PLATFORM=sglang_topp_cpu sglang-topp doctor   # on a CPU, SGLang before 0.5.14",
        ],
    )
    parser.add_argument("--url", help="check this sidecar or SGLang instead, with requests for four tokens")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="list every function that is hooked or called, and the limits",
    )


def _run(args: argparse.Namespace) -> int:
    if args.url is not None:
        return _check_server(args.url)
    if find_spec("sglang") is None:
        return fail(
            "SGLang is not installed, so there is nothing to check: pip install 'sglang-topp[sglang]'", USAGE
        )
    from sglang_topp_patches.plugin import report

    is_whole, lines = report(args.verbose)
    print("\n".join(lines))
    return 0 if is_whole else FAILED


def _check_server(url: str) -> int:
    """Print what a server is, if sets come back from it.

    Raises:
        SglangToppError: the server does not answer, is not ready, or loses a field.
    """
    from sglang_topp_client import RolloutClient

    with RolloutClient(url, api_key=read_key(SIDECAR_KEY)) as client:
        client.check_servers()
        info = client.server_info()
    engine = info.get("engine", info)
    version = engine.get("sglang_version") or engine.get("version")
    print(f"{url}: SGLang {version}, model {engine.get('model_path')}")
    print("its plugin is active, and no field is lost on the way")
    return 0
