"""`make soak`: the real server under everything at once for half an hour, and one table at the end.

    SECONDS=1800 REQUESTS=20000 python -m tests.soak [mixed] [kills] [abuse]

SECONDS bounds the mixed requests and the abuse (two thirds and one third of it), REQUESTS the mixed ones;
the kills take what seven starts of SGLang take. The exit status is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from sglang_topp_server.tiny_model import make_tiny_model
from tests.soak import abuse, kills, mixed
from tests.soak.asks import VOCAB_SIZE
from tests.soak.report import Report, table
from tests.soak.serving import serve

_PARTS = ("mixed", "kills", "abuse")
_LARGE_VOCAB_SIZE = 151_936


async def _run(parts: list[str], folder: Path, seconds: float, count: int) -> list[Report]:
    model = make_tiny_model(folder / "model", vocab_size=VOCAB_SIZE)
    reports = []
    if "mixed" in parts:
        seed = time.time_ns() % 1_000_000
        print(f"mixed requests, seed {seed}", flush=True)
        with serve(model, folder / "mixed.log", *mixed.SGLANG_ARGUMENTS) as server:
            reports.append(
                await mixed.run_mixed(server, model, seconds=seconds * 2 / 3, count=count, seed=seed)
            )
    if "kills" in parts:
        print("kills", flush=True)
        reports += await kills.run_kills(model, folder)
    if "abuse" in parts:
        print("abuse", flush=True)
        large = make_tiny_model(folder / "large", vocab_size=_LARGE_VOCAB_SIZE, logit_std=7.0)
        with serve(large, folder / "abuse.log", *abuse.SGLANG_ARGUMENTS) as server:
            reports += await abuse.run_abuse(server, seconds=seconds / 3)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", choices=[*_PARTS, []], help="all of them by default")
    parts = parser.parse_args().part or list(_PARTS)
    seconds = float(os.environ.get("SECONDS", 1800))
    count = int(os.environ.get("REQUESTS", 20_000))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="sglang-topp-soak-") as folder:
        reports = asyncio.run(_run(parts, Path(folder), seconds, count))
        print(table(reports))
    problems = [problem for report in reports for problem in report.problems()]
    for problem in problems:
        print(f"goal missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
