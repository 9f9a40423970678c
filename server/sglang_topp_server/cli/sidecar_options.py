"""Add the sidecar's options to the commands `serve` and `sidecar`, and build the sidecar's settings."""

from __future__ import annotations

import argparse
import resource
from dataclasses import fields
from typing import TYPE_CHECKING

from sglang_topp_server.cli.common import ENGINE_KEY, SIDECAR_KEY, count, port, read_key, seconds
from sglang_topp_server.settings import Limits

if TYPE_CHECKING:
    from sglang_topp_server.settings import Settings

__all__ = ["KEYS_NOTE", "add_sidecar_options", "raise_file_limit", "settings_of"]

KEYS_NOTE = (
    f"Keys come from the environment: callers must send {SIDECAR_KEY}, and {ENGINE_KEY} is the engine's key."
)
"""A note on API keys, for the help texts of `serve` and `sidecar`."""

_MAX_FILES = 1 << 16


def add_sidecar_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sidecar's address, its limits, and its page of recent rollouts."""
    limits = Limits()
    parser.add_argument("--host", default="127.0.0.1", help="the sidecar's listen address (%(default)s)")
    parser.add_argument("--port", type=port, default=30010, help="the sidecar's port (%(default)s; 0: free)")
    for name, kind, default, what in (
        ("--max-in-flight", count, limits.max_in_flight, "samples at once from which on requests get a 429"),
        ("--max-samples", count, limits.max_samples, "maximum samples of one request: prompts times n"),
        ("--max-body-bytes", count, limits.max_body_bytes, "maximum bytes of one request body"),
        (
            "--io-timeout-s",
            seconds,
            limits.io_timeout_s,
            "seconds that a caller has to send its body before it gets a 408, and that it may leave its"
            " answer unread before its connection is reset",
        ),
        (
            "--max-held-bytes",
            count,
            limits.max_held_bytes,
            "maximum bytes of finished samples that wait for their callers",
        ),
        (
            "--grace-s",
            seconds,
            20.0,
            "seconds that requests in flight have to end after a signal, and then the engine",
        ),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{what} (%(default)s)")
    parser.add_argument(
        "--view",
        type=count,
        default=0,
        metavar="N",
        help="keep the last N rollouts in memory, and show them at GET /view (off)",
    )


def settings_of(args: argparse.Namespace, engine_url: str, **others: float) -> Settings:
    """Build the sidecar's settings from the parsed options and the keys in the environment.

    Raises:
        InvalidInputError: a key is empty, or begins or ends with white space.
    """
    from sglang_topp_server.settings import Settings

    return Settings(
        host=args.host,
        port=args.port,
        engine_url=engine_url,
        api_key=read_key(SIDECAR_KEY),
        engine_api_key=read_key(ENGINE_KEY),
        limits=Limits(**{one.name: getattr(args, one.name) for one in fields(Limits)}),
        grace_s=args.grace_s,
        view=args.view,
        **others,
    )


def raise_file_limit() -> None:
    """Raise the process's soft limit on open files, because each request in flight holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MAX_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MAX_FILES), hard))
