"""Broadcast a model's tensors to every engine of a fleet, over a torch process group.

Each push creates its own process group, and destroys the process group at the end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from sglang_topp.errors import SglangToppError, TransportError
from sglang_topp_client.weight_push.engine_control import EngineControl, Outcomes, on_each
from sglang_topp_client.weight_push.tensors_to_push import Bucket, NamedTensor

# After one engine has failed, a push gives the other engines this many seconds to finish. Without this limit,
# a push could hang, because the other engines may wait forever for the failed engine.
_GRACE_S = 5.0


async def push_broadcasts(
    engines: Sequence[EngineControl], parts: Iterator[Bucket], version: str, timeout_s: float
) -> Outcomes:
    """Broadcast a model's tensors to paused engines, and return the outcome of each engine.

    This process is rank 0 of the process group. If one engine fails, the push fails on all engines, because
    all engines take part in the same collective operations.

    Args:
        engines: the paused engines, whose updates have begun. `EngineControl.check` must have set the
            `tp_size` of each.
        parts: the tensors of the whole model, in buckets.
        version: the weight version of the pushed tensors.
        timeout_s: the time limit of each collective operation.
    """
    group = _Group(engines, timeout_s)
    try:
        await group.broadcast(parts, version)
    except SglangToppError as error:
        # Do not call `end_update`, because an engine that still waits for other engines cannot end its update
        # session. In the next push, `begin_update` ends the update sessions that are still open.
        return [group.failures.get(engine, error) for engine in engines]
    finally:
        await group.destroy()
    return await on_each(engines, EngineControl.end_update)


class _Group:
    """The torch process group of one push, whose members are this process and all ranks of the engines."""

    def __init__(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        self._engines = engines
        self._timeout = timedelta(seconds=timeout_s)
        self._name = f"sglang-topp-{uuid.uuid4().hex}"
        self._group: Any = None
        self._has_engines = False
        self.failures: dict[EngineControl, SglangToppError] = {}

    async def broadcast(self, parts: Iterator[Bucket], version: str) -> None:
        """Create the process group and broadcast all tensors.

        Raises:
            SglangToppError: an engine or the process group failed. `failures` maps each failed engine to its
                error.
        """
        is_last = False
        while not is_last:
            bucket, is_last = await asyncio.to_thread(next, parts)
            if self._group is None:
                first = bucket[0][1]
                device, backend = (first.device, "nccl") if first.is_cuda else ("cpu", "gloo")
                await self._make(backend)
            values = [(name, tensor.to(device).contiguous()) for name, tensor in bucket]
            body = {
                "names": [name for name, _ in values],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in values],
                "shapes": [list(tensor.shape) for _, tensor in values],
                "group_name": self._name,
                "flush_cache": False,
                "weight_version": version if is_last else None,
            }
            update = partial(EngineControl.update, path="/update_weights_from_distributed", body=body)
            await self._together(update, partial(self._send, values))

    async def destroy(self) -> None:
        """Destroy the process group, unless an operation of the process group is still running."""
        if self._has_engines and not self.failures:
            leave = partial(
                EngineControl.update, path="/destroy_weights_update_group", body={"group_name": self._name}
            )
            await on_each(self._engines, leave)
        if self._group is not None:
            from torch import distributed

            group, self._group = self._group, None
            await _in_daemon_thread(partial(distributed.destroy_process_group, group))

    async def _make(self, backend: str) -> None:
        from torch import distributed

        address = await asyncio.to_thread(_own_address, [engine.base_url for engine in self._engines])
        world_size = 1 + sum(engine.tp_size for engine in self._engines)
        # `TCPStore` is public, but torch does not declare the name to type checkers.
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        offsets, offset = {}, 1
        for engine in self._engines:
            offsets[engine] = offset
            offset += engine.tp_size
        common = {
            "master_address": address,
            "master_port": store.port,
            "world_size": world_size,
            "group_name": self._name,
            "backend": backend,
        }
        await self._together(
            lambda engine: engine.update(
                "/init_weights_update_group", {**common, "rank_offset": offsets[engine]}
            ),
            partial(self._join, store, world_size, backend),
        )
        self._has_engines = True

    def _join(self, store: Any, world_size: int, backend: str) -> None:
        """Join the process group as rank 0.

        torch's public functions create a process group only from members of torch's default group. This
        process and the engines have no default group in common. SGLang's ranks therefore join through
        private functions of torch. This process must call the same functions, because all ranks exchange keys
        through one store.
        """
        from torch.distributed import distributed_c10d

        # Annotate `c10d` as `Any`, because the types in `distributed_c10d` differ between torch releases.
        c10d: Any = distributed_c10d
        group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(self._name, store),
            group_name=self._name,
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self._group = group

    def _send(self, values: Sequence[NamedTensor]) -> None:
        from torch import distributed

        work: list[Any] = [
            distributed.broadcast(tensor, src=0, group=self._group, async_op=True) for _, tensor in values
        ]
        for one in work:
            one.wait()
        if values[0][1].is_cuda:
            import torch

            torch.cuda.synchronize(values[0][1].device)

    async def _together(
        self, step: Callable[[EngineControl], Coroutine[Any, Any, None]], work: Callable[[], None]
    ) -> None:
        """Run `step` on all engines. At the same time, run `work` in this process.

        Raises:
            SglangToppError: an engine failed, or `work` failed in this process.
        """
        own = _in_daemon_thread(work)
        steps = {asyncio.create_task(step(engine)): engine for engine in self._engines}
        try:
            _, waiting = await asyncio.wait({own, *steps}, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=_GRACE_S)
        finally:
            for future in (own, *steps):
                future.cancel()
            await asyncio.wait({own, *steps})
            if own.cancelled():
                # The daemon thread that runs `work` still waits for the engines in a collective operation.
                # The thread frees the process group when the collective operation times out.
                self._group, self._has_engines = None, False
        for task, engine in steps.items():
            error = None if task.cancelled() else task.exception()
            if isinstance(error, SglangToppError):
                self.failures[engine] = error
            elif error is not None:
                raise error
        if self.failures:
            raise TransportError("the broadcast stopped, because another engine failed")
        failure = "it did not end in this process" if own.cancelled() else own.exception()
        if failure is not None:
            raise TransportError(f"the broadcast of the weights failed: {failure}")


def _in_daemon_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run `work` in a daemon thread, so that the program can exit even if `work` never ends."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            work()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sglang-topp-broadcast", daemon=True).start()
    return asyncio.wrap_future(future)


def _own_address(urls: Sequence[str]) -> str:
    """Return an address at which the engines can reach this machine, preferably not a loopback address."""
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        family, kind, _, _, to = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # on a UDP socket, `connect` only selects the local address, and sends nothing
            addresses.append(str(probe.getsockname()[0]))
    return next((one for one in addresses if not one.startswith("127.") and one != "::1"), addresses[0])
