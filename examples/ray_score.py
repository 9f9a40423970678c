"""Let a teacher score all Parquet files of rollouts in a directory, on a Ray cluster.

Ray Data gives each Parquet file to an actor. If the node of an actor dies, Ray Data gives that actor's
Parquet file to another actor. An actor writes its scores to a temporary file in the output directory. Once
the temporary file is complete, the actor gives it the input file's name. A restarted run therefore scores
only the input files that have no output file. An actor holds in memory one row group of its input file and
some scored rollouts, however large the input file is. An output file has the rollouts of its input file in
the same order. Each rollout in an output file has the teacher's log-probs and candidate sets instead of the
student's.

    sglang-topp serve --model-path TEACHER                    # on one machine or on several
    python examples/ray_score.py ROLLOUTS SCORES --url http://teacher:30010

All nodes must see the directories ROLLOUTS and SCORES. `load_rollouts("SCORES")` reads the result.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from sglang_topp_client import Rollout, RolloutClient, load_rollouts, save_rollouts


class PartScorer:
    """An actor that scores one Parquet file of rollouts after another.

    Args:
        output: the directory of the output files.
        urls: the teacher's servers.
        top_logprobs_p: the nucleus threshold p of the teacher's candidate sets.
        at_a_time: the number of rollouts that are scored, and held in memory, at a time.
    """

    def __init__(self, output: Path, urls: Sequence[str], top_logprobs_p: float, at_a_time: int) -> None:
        self.output, self.top_logprobs_p, self.at_a_time = output, top_logprobs_p, at_a_time
        self.teacher = RolloutClient(urls)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Score one Parquet file, unless its output file exists already."""
        part = Path(row["path"])
        done = self.output / part.name
        if not done.exists():
            # Ray may start a second attempt to score a file while the first attempt still runs, so each
            # attempt writes to its own temporary file.
            attempt = self.output / f".{part.name}.{uuid.uuid4().hex}"
            save_rollouts(attempt, self.score(load_rollouts(part)), row_group_size=self.at_a_time)
            os.replace(attempt, done)
        return {"part": part.name, "node": ray.get_runtime_context().get_node_id()}

    def score(self, rollouts: Iterator[Rollout]) -> Iterator[Rollout]:
        """Yield the rollouts with the teacher's log-probs and candidate sets."""
        while some := list(itertools.islice(rollouts, self.at_a_time)):
            scores = self.teacher.score(some, top_logprobs_p=self.top_logprobs_p)
            for rollout, score in zip(some, scores, strict=True):
                yield replace(
                    rollout,
                    logprobs=score.logprobs,
                    candidates=score.candidates,
                    weight_version=score.weight_version,
                    weight_spans=None,
                    top_logprobs_source="distribution",
                    top_logprobs_p=self.top_logprobs_p,
                )


def main() -> int:
    """Run the example. Return 0 if every input file has its output file, and 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rollouts", type=Path, help="a directory that RolloutWriter wrote")
    parser.add_argument("output", type=Path, help="a directory")
    parser.add_argument("--url", action="append", required=True, help="of a teacher's server; several work")
    parser.add_argument("--address", help="of a running cluster (default: start Ray on this machine)")
    parser.add_argument("--top-logprobs-p", type=float, default=0.99, help="of the sets (%(default)s)")
    parser.add_argument("--actors", type=int, default=2, help="parts at a time (%(default)s)")
    parser.add_argument("--at-a-time", type=int, default=64, help="rollouts per actor (%(default)s)")
    args = parser.parse_args()

    args.output.mkdir(parents=True, exist_ok=True)
    for unfinished in args.output.glob(".*"):
        unfinished.unlink()
    parts = sorted(args.rollouts.glob("*.parquet"))
    missing = [{"path": str(part.resolve())} for part in parts if not (args.output / part.name).exists()]
    print(f"{len(parts) - len(missing)} of {len(parts)} parts are scored already", flush=True)
    if missing:
        local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(args.address or "local", **({} if args.address else local), log_to_driver=False)
        scored = ray.data.from_items(missing, override_num_blocks=len(missing)).map(
            PartScorer,
            fn_constructor_args=(args.output.resolve(), args.url, args.top_logprobs_p, args.at_a_time),
            concurrency=args.actors,
            num_cpus=0.5,
        )
        for row in scored.iter_rows():
            print(f"{row['part']} on node {row['node'][:8]}", flush=True)
        ray.shutdown()
    return 0 if all((args.output / part.name).exists() for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
