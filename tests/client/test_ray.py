"""Clients travel into real Ray actors, which have event loops of their own, and rollouts travel back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sglang_topp_client import AsyncRolloutClient, RolloutClient


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


def test_a_synchronous_actor(local_ray: ModuleType, engine: Any) -> None:
    @local_ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, client: RolloutClient) -> None:
            self.client = client

        def roll_out(self, prompt: str) -> Any:
            return self.client.generate(prompt, top_logprobs_p=0.9)

    client = RolloutClient(engine.url, kind="sglang")
    (here,) = client.generate("a", top_logprobs_p=0.9)
    worker = Worker.remote(client)
    ((there,),) = local_ray.get([worker.roll_out.remote("a")])
    assert there.candidates == here.candidates
    client.close()
