"""Stand-ins for Ray's actors: verl's objects in this process, behind the interface of an actor's handle."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
from types import SimpleNamespace
from typing import Any

from sglang_topp import CandidateSets, formats
from sglang_topp_integrations.verl import FIELD

__all__ = ["LocalHandle", "LocalWorkerGroup", "RecordingServer"]


class LocalHandle:
    """`handle.method.remote(...)` calls the method here, and returns its result in a future."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=functools.partial(self._call, getattr(self._actor, name)))

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        result = method(*args, **kwargs)
        if asyncio.iscoroutine(result):
            return asyncio.ensure_future(result)
        future = asyncio.get_running_loop().create_future()
        future.set_result(result)
        return future


class RecordingServer:
    """verl's server. It keeps what it answered, and pickles it as on the way between two actors."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.answers: list[tuple[list[int], Any, CandidateSets]] = []
        """For each request with sets: the ids of its prompt, verl's `TokenOutput`, and its sets."""

    async def generate(self, request_id: str, prompt_ids: list[int], **kwargs: Any) -> Any:
        output = await self._server.generate(
            request_id=request_id, prompt_ids=prompt_ids, **copy.deepcopy(kwargs)
        )
        if FIELD in output.extra_fields:
            sets = formats.unpack(output.extra_fields[FIELD])
            self.answers.append((list(prompt_ids), output.model_copy(deep=True), sets))
        return pickle.loads(pickle.dumps(output))


class LocalWorkerGroup:
    """verl's training worker as a group of one, with the dispatch information of `dp_size` ranks."""

    def __init__(self, worker: Any, dp_size: int) -> None:
        self._worker = worker
        self._dispatch_info = {"actor": list(range(dp_size))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)
