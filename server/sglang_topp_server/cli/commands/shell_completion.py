"""`sglang-topp completion`: print the completion script for bash or zsh."""

from __future__ import annotations

import argparse

from sglang_topp_server.cli.add_subcommand import add_command

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `completion`, which prints a script for the shell completion of `sglang-topp`.

    `main` stores the root parser, which contains the subcommands' parsers, in `args.root`.
    """
    parser = add_command(
        commands,
        "completion",
        "print a script with which bash or zsh completes this command",
        examples=[
            "source <(sglang-topp completion bash)                              # this shell",
            "mkdir -p ~/.local/share/bash-completion/completions",
            "sglang-topp completion bash > ~/.local/share/bash-completion/completions/sglang-topp",
            'sglang-topp completion zsh > "${fpath[1]}/_sglang-topp"',
        ],
    )
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(args.root, shell=args.shell))
    return 0
