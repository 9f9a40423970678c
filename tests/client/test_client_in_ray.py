"""Real Ray actors, each with its own event loop, receive clients and return rollouts."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from sglang_topp import CandidateSets
from sglang_topp_client import AsyncRolloutClient
from tests.client import conftest as fakes


def test_an_asynchronous_actor(local_ray: ModuleType, engine: Any) -> None:
    @local_ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, client: AsyncRolloutClient) -> None:
            self.client = client

        async def roll_out(self, prompts: list[str]) -> Any:
            return await self.client.generate(prompts, {"n": 2}, top_logprobs_p=0.9)

    worker = Worker.remote(AsyncRolloutClient(engine.url, kind="sglang"))
    # Several calls at once on the actor's loop.
    answers = local_ray.get([worker.roll_out.remote(["a", "b"]) for _ in range(5)])
    for rollouts in answers:
        assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert all(len(r.candidates) == len(r.output_ids) > 0 for r in rollouts)


def test_rollouts_are_read_from_shared_memory_without_a_copy(local_ray: ModuleType) -> None:
    """A trainer that gets references reads the arrays where the rollout actor's result lies."""

    @local_ray.remote(num_cpus=0)
    class Worker:
        def roll_out(self) -> Any:
            sets = CandidateSets.concat([rollout.candidates for _ in range(20_000)])
            return [replace(rollout, candidates=sets)]

    @local_ray.remote(num_cpus=0)
    class Trainer:
        def arrays_in_place(self, references: list[Any]) -> list[bool]:
            ((first,),), ((second,),) = local_ray.get(references), local_ray.get(references)
            a, b = first.candidates, second.candidates
            return [
                getattr(a, name).ctypes.data == getattr(b, name).ctypes.data
                and not getattr(a, name).flags.writeable
                for name in ("token_ids", "logprobs", "offsets", "sampled_ids")
            ]

    rollout = fakes.sample([5], 0)
    reference = Worker.remote().roll_out.remote()
    assert local_ray.get(Trainer.remote().arrays_in_place.remote([reference])) == [True] * 4
