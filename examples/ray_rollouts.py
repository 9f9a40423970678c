"""Roll out on a Ray cluster: an engine on every node, and rollout actors that use all engines.

Ray places the actors and moves the rollouts. The client balances the load over the engines, and moves samples
away from an engine that dies. The driver process keeps one result per prompt. If a node dies and a prompt's
actor or result is lost, the driver rolls out the prompt again, and the trainer still receives one result per
prompt. The trainer receives Ray object references, and reads the candidate sets from its node's shared memory
without a copy.

    python examples/ray_rollouts.py                                  # starts Ray and an engine here
    python examples/ray_rollouts.py --address auto --model-path MODEL --gpus-per-engine 1 -- --tp-size 1
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tiny_model import make_tiny_model
from train import loss_sum
from transformers import AutoModelForCausalLM

from sglang_topp.batch import collate_rollouts
from sglang_topp_client import AsyncRolloutClient, Rollout, save_rollouts

TINY_ENGINE = ["--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
TINY_ENGINE += ["--sleep-on-idle"]  # without this option, an idle engine takes a core from the others
PR_SET_PDEATHSIG = 1


@ray.remote
class Engine:
    """An actor that runs `sglang-topp serve`. If the actor's process ends, Linux kills `sglang-topp`."""

    def __init__(self, model_path: str, host: str, engine_args: Sequence[str]) -> None:
        command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", model_path]
        command += ["--host", host, "--port", "0", "--engine-port", "0"]
        env = dict(os.environ)
        if not torch.accelerator.is_available():
            env.setdefault("SGLANG_PLATFORM", "sglang_topp_cpu")
        prctl = ctypes.CDLL(None).prctl
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115  # lives as long as the actor
        self.process = subprocess.Popen(
            [*command, "--", *engine_args],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def urls(self) -> tuple[str, str]:
        """Wait until the server is ready, and return the URLs of the sidecar and of the engine."""
        assert self.process.stdout is not None
        # Once ready, `sglang-topp serve` prints one line to stdout: "… is ready: sidecar URL engine URL".
        words = self.process.stdout.readline().split()
        if "sidecar" not in words:
            raise RuntimeError(f"{Path(self.log.name).read_text()[-4000:]}\nthe server did not start")
        return words[words.index("sidecar") + 1], words[words.index("engine") + 1]


@ray.remote(num_cpus=0)
class RolloutWorker:
    """An actor that rolls out prompts on all engines. Concurrent `roll_out` calls share one event loop."""

    def __init__(self, urls: Sequence[str], sampling: dict[str, Any]) -> None:
        self.client = AsyncRolloutClient(urls)
        self.sampling = sampling

    async def roll_out(self, prompt_index: int, prompt: str) -> list[Rollout]:
        """Return the samples of one prompt. In this method, you can call your own tools or reward model."""
        rollouts = await self.client.generate(prompt, self.sampling, top_logprobs_source="sampler")
        return [replace(rollout, prompt_index=prompt_index) for rollout in rollouts]


@ray.remote(num_cpus=0)
class Trainer:
    """An actor that scores rollouts over their candidate sets, with the weights that the engines serve."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def score(self, references: Sequence[ray.ObjectRef]) -> dict[str, float]:
        """Read rollouts from this node's shared memory, and return their replay metrics."""
        rollouts = [rollout for each in ray.get(list(references)) for rollout in each]
        batch = collate_rollouts(rollouts, np.zeros(len(rollouts)), pad_token_id=0)
        _, metrics = loss_sum(self.model, batch, replay=True)
        return metrics.summary()


def roll_out(
    workers: Iterable[Any], prompts: Sequence[str], in_flight: int
) -> dict[int, tuple[ray.ObjectRef, list[Rollout]]]:
    """Roll out all prompts, and return a dict that maps each prompt's index to the prompt's result.

    A result is a pair: a Ray object reference, and the rollouts to which the reference refers.

    Args:
        workers: `RolloutWorker` actors.
        prompts: the prompts.
        in_flight: the number of prompts that each worker rolls out at a time.

    Raises:
        RuntimeError: every worker has died.
        RayTaskError: a rollout failed for a reason other than a lost node.
    """
    alive = list(workers)
    waiting = deque(range(len(prompts)))
    running: dict[ray.ObjectRef, tuple[int, Any]] = {}
    finished: dict[int, tuple[ray.ObjectRef, list[Rollout]]] = {}
    while len(finished) < len(prompts):
        if not alive:
            raise RuntimeError(f"all workers died; {len(finished)} of {len(prompts)} prompts are finished")
        load = Counter(worker for _, worker in running.values())
        while waiting and len(running) < in_flight * len(alive):
            worker = min(alive, key=lambda each: load[each])
            load[worker] += 1
            index = waiting.popleft()
            running[worker.roll_out.remote(index, prompts[index])] = index, worker
        (reference, *_), _ = ray.wait(list(running))
        index, worker = running.pop(reference)
        try:
            # `ray.get` copies the rollouts into this node's memory, and the rollouts' arrays refer to that
            # copy. The rollouts therefore survive the loss of the node that generated them.
            rollouts = ray.get(reference)
        except (RayActorError, ObjectLostError) as error:
            print(f"prompt {index} again: {type(error).__name__}", flush=True)
            waiting.append(index)
            if isinstance(error, RayActorError) and worker in alive:
                alive.remove(worker)
        else:
            finished[index] = reference, rollouts
            print(f"{len(finished)} of {len(prompts)} prompts finished", flush=True)
    return finished


def main() -> int:
    """Run the example, and return the exit status: 0 if the mean importance ratio is 1, or else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a running cluster (default: start Ray on this machine)")
    parser.add_argument("--model-path", help="readable on every node (default: a tiny random model)")
    parser.add_argument("--prompts", type=int, default=16, help="how many (%(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="per prompt (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per sample (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=8, help="prompts per node at a time (%(default)s)")
    parser.add_argument("--gpus-per-engine", type=float, default=0, help="(%(default)s)")
    parser.add_argument("--output", type=Path, help="a Parquet file for the rollouts")
    parser.add_argument("engine_args", nargs="*", help="arguments of SGLang, after a --")
    args = parser.parse_args()
    sampling = {"top_p": 0.8, "temperature": 1.0, "n": args.samples, "ignore_eos": True}
    sampling["max_new_tokens"] = args.max_new_tokens

    with tempfile.TemporaryDirectory() as folder:
        local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(args.address or "local", **({} if args.address else local), log_to_driver=False)
        model_path = args.model_path or str(make_tiny_model(folder))
        engine_args = args.engine_args or ([] if args.gpus_per_engine else TINY_ENGINE)
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive]
        on_engine = {"num_cpus": 1, "num_gpus": args.gpus_per_engine}
        engines = [
            Engine.options(scheduling_strategy=place, **on_engine).remote(
                model_path, node["NodeManagerAddress"], engine_args
            )
            for place, node in zip(nodes, alive, strict=True)
        ]
        urls = [sidecar for sidecar, _ in ray.get([engine.urls.remote() for engine in engines])]
        print(f"{len(urls)} engines are ready: {' '.join(urls)}", flush=True)
        workers = [RolloutWorker.options(scheduling_strategy=node).remote(urls, sampling) for node in nodes]
        prompts = [f"Chapter {i}. Once upon a time" for i in range(args.prompts)]
        finished = roll_out(workers, prompts, args.in_flight)

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        trainer = Trainer.options(scheduling_strategy=here).remote(model_path)
        # Ray does not resolve references inside a list, so this call sends the references (28 bytes each),
        # not the rollouts.
        metrics = ray.get(trainer.score.remote([finished[index][0] for index in range(len(prompts))]))
        rollouts = [rollout for index in range(len(prompts)) for rollout in finished[index][1]]
        if args.output is not None:
            save_rollouts(args.output, rollouts)
        print(f"{len(rollouts)} rollouts of {len(finished)} prompts, {metrics['replay/tokens']:.0f} tokens")
        print(f"mean importance ratio {metrics['replay/ratio_mean']:.4f}")
        ray.shutdown()
    return 0 if abs(metrics["replay/ratio_mean"] - 1) < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
