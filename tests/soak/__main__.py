"""`make soak`: run mixed load, kills, and hostile callers on real servers, and print one table.

    SECONDS=1800 REQUESTS=20000 python -m tests.soak [mixed] [engines] [kills] [abuse]

SECONDS limits the time: half for `mixed`, and a quarter each for `engines` and `abuse`. REQUESTS limits the
requests of `mixed`. `kills` takes as long as seven starts of SGLang. The exit status is 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from examples.tiny_model import make_tiny_model
from tests.cpu_platform import request_cpu_platform
from tests.engine.pushed_weights import make_weights
from tests.soak import hostile_load, mixed_load, process_kills, two_servers_killed
from tests.soak.random_requests import VOCAB_SIZE
from tests.soak.report import Report, table
from tests.soak.serve_process import serve

_PARTS = ("mixed", "engines", "kills", "abuse")
_LARGE_VOCAB_SIZE = 151_936


async def _run(parts: list[str], folder: Path, seconds: float, count: int) -> AsyncGenerator[Report, None]:
    model = make_tiny_model(folder / "model", vocab_size=VOCAB_SIZE)
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}", flush=True)
    if "mixed" in parts:
        weights = make_weights(model, folder, VOCAB_SIZE)
        with serve(model, folder / "mixed.log", *mixed_load.SGLANG_ARGUMENTS) as server:
            yield await mixed_load.run_mixed(server, weights, seconds=seconds / 2, count=count, seed=seed)
    if "engines" in parts:
        yield await two_servers_killed.run_engines(model, folder, seconds=seconds / 4, count=count, seed=seed)
    if "kills" in parts:
        async for report in process_kills.run_kills(model, folder):
            yield report
    if "abuse" in parts:
        large = make_tiny_model(folder / "large", vocab_size=_LARGE_VOCAB_SIZE, logit_std=7.0)
        with serve(large, folder / "abuse.log", *hostile_load.SGLANG_ARGUMENTS) as server:
            async for report in hostile_load.run_abuse(server, seconds=seconds / 4):
                yield report


async def _collect(parts: list[str], folder: Path, seconds: float, count: int) -> list[Report]:
    reports = []
    async with aclosing(_run(parts, folder, seconds, count)) as lines:
        async for report in lines:
            print(f"{report.name}: {'; '.join(report.problems()) or 'every goal is met'}", flush=True)
            reports.append(report)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all by default")
    parts = parser.parse_args().part or list(_PARTS)
    if unknown := sorted(set(parts) - set(_PARTS)):
        parser.error(f"no part named {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    request_cpu_platform()
    seconds = float(os.environ.get("SECONDS", 1800))
    count = int(os.environ.get("REQUESTS", 20_000))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # So that the server is ended, whoever ends this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="sglang-topp-soak-") as folder:
        reports = asyncio.run(_collect(parts, Path(folder), seconds, count))
        print(table(reports))
    problems = [problem for report in reports for problem in report.problems()]
    for problem in problems:
        print(f"goal missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
