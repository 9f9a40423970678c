"""The command line of `sglang-topp`: parse arguments, and run a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from sglang_topp.errors import SglangToppError
from sglang_topp_server.cli import doctor, generate, serve, view
from sglang_topp_server.cli.common import FAILED, INTERRUPTED, USAGE, fail

_OF_THE_SERVER_EXTRA = (
    *("fastapi", "uvicorn", "uvloop", "pydantic", "prometheus_client", "starlette", "pydantic_core"),
)
_EPILOG = """\
exit status:
  0    success; for serve and sidecar, after SIGINT or SIGTERM
  1    failure, described in one sentence on stderr
  2    wrong arguments, or an extra that is not installed
  130  interrupted (Ctrl-C)

`sglang-topp COMMAND --help` shows examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. `_EPILOG` lists the possible exit statuses.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse would drop the `--` and parse SGLang's options as options of `sglang-topp`. So split the
    # arguments at `--` before argparse parses them.
    split = given.index("--") if "--" in given else len(given)
    parser = _parser()
    args, unknown = parser.parse_known_args(given[:split])
    args.sglang_args = given[split + 1 :]
    if unknown:
        hint = "; put SGLang's own arguments after --" if args.takes_sglang_args else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if args.sglang_args and not args.takes_sglang_args:
        parser.error("arguments after -- are SGLang's, and only `serve` starts it")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The process that reads the output, such as `head`, has exited. At exit, Python would flush stdout
        # and fail with an error, so redirect stdout to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name in ("pyarrow", "tokenizers"):
            return fail(str(error), USAGE)
        if name not in _OF_THE_SERVER_EXTRA:
            raise
        return fail(
            f"{name} is not installed; this needs the server extra: pip install 'sglang-topp[server]'", USAGE
        )
    except (SglangToppError, OSError) as error:
        return fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-topp",
        description="Exact top-p candidate sets from SGLang rollouts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-topp {version('sglang-topp')}")
    parser.set_defaults(takes_sglang_args=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (serve, generate, view, doctor):
        module.add_parsers(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
