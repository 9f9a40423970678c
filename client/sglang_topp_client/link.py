"""Link: one server, from one event loop. Its connections, what it is, and how its requests are aborted."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import Any, Literal, TypeAlias

from sglang_topp.errors import BadRequestError, WireError
from sglang_topp_client import aborts
from sglang_topp_client.aborts import Aborts
from sglang_topp_client.http import Connections, Server
from sglang_topp_client.sidecar_api import SERVICE

__all__ = ["Kind", "Link"]

Kind: TypeAlias = Literal["sidecar", "sglang"]

_INFO_PATHS: dict[Kind, str] = {"sidecar": "/info", "sglang": "/server_info"}
_INFO_TIMEOUT_S = 30.0
# A sidecar waits for its engine itself.
_SIDECAR_ABORT_TIMEOUT_S = 10.0


class Link:
    """One server.

    Args:
        server: where it is.
        kinds: what servers are known to be, by `base_url`; shared by the links of all event loops.
        long_lines_at_once: see `Connections`.
    """

    def __init__(self, server: Server, kinds: dict[str, Kind], long_lines_at_once: int) -> None:
        self.base_url = server.base_url
        # Eight characters that tell it from others.
        self._address = hashlib.blake2s(server.base_url.rstrip("/").encode(), digest_size=4).hexdigest()
        self.connections = Connections(server, long_lines_at_once)
        self.aborts = Aborts(self.abort)
        self._kinds = kinds
        self._kind_lock = asyncio.Lock()

    def made(self, routing_key: str) -> bool:
        """Whether a rollout of that key came from here."""
        return routing_key.endswith(f"-{self._address}")

    def routing_key(self, earlier: str) -> str:
        """The key of what is asked for here.

        Args:
            earlier: of the rollout that it goes on from, whose first part stays; or empty.
        """
        return f"{earlier.partition('-')[0] or secrets.token_hex(8)}-{self._address}"

    async def kind(self) -> Kind:
        """What listens there; asked once, `GET /info`, unless it is known.

        Raises:
            SglangToppError: there is no answer that tells.
        """
        async with self._kind_lock:
            if (known := self._kinds.get(self.base_url)) is None:
                known = self._kinds[self.base_url] = "sidecar" if await self._is_sidecar() else "sglang"
            return known

    async def info(self) -> dict[str, Any]:
        """What it says about itself.

        Raises:
            SglangToppError: there is no such answer.
        """
        path = _INFO_PATHS[await self.kind()]
        info = await self.connections.request_json("GET", path, timeout_s=_INFO_TIMEOUT_S)
        if not isinstance(info, dict):
            raise WireError(path, f"got {type(info).__name__}, expected an object")
        return info

    async def abort(self, engine_id: str) -> None:
        """Ask an engine to abort its request of that id."""
        await self.connections.request_json(
            "POST", "/abort_request", {"rid": engine_id}, timeout_s=aborts.TIMEOUT_S
        )

    async def stop(self, request_id: str) -> None:
        """Ask the server to abort what it knows under that name: an engine's id, or what a sidecar's caller
        named it."""
        if await self.kind() == "sglang":
            await self.abort(request_id)
            return
        try:
            await self._abort_by_sidecar({"request_id": request_id})
        except BadRequestError as error:
            # A sidecar of before takes no such order: it watches its connections.
            if error.status not in (404, 405):
                raise

    async def stop_all(self) -> None:
        """Ask the server to abort everything that its engine has in flight."""
        if await self.kind() == "sidecar":
            await self._abort_by_sidecar({"all": True})
            return
        await self.connections.request_json(
            "POST", "/abort_request", {"abort_all": True}, timeout_s=aborts.TIMEOUT_S
        )

    async def _abort_by_sidecar(self, body: dict[str, Any]) -> None:
        await self.connections.request_json("POST", "/abort", body, timeout_s=_SIDECAR_ABORT_TIMEOUT_S)

    async def _is_sidecar(self) -> bool:
        try:
            info = await self.connections.request_json("GET", "/info", timeout_s=_INFO_TIMEOUT_S)
        except BadRequestError as error:
            if error.status not in (404, 405):
                raise
            return False
        return isinstance(info, dict) and info.get("service") == SERVICE
