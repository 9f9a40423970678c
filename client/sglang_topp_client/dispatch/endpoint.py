"""Endpoint: one server with its HTTP client, kind (engine or sidecar), health check, and pending aborts."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

from sglang_topp.errors import BadRequestError, ServerError, WireError
from sglang_topp_client.dispatch import abort_delivery
from sglang_topp_client.dispatch.abort_delivery import AbortDelivery
from sglang_topp_client.dispatch.hang_detection import HealthCheck
from sglang_topp_client.protocols import sglang_tokenize
from sglang_topp_client.protocols.lost_fields import (
    REFUSABLE,
    check_fields_of_answer,
    field_check_requests,
)
from sglang_topp_client.protocols.sidecar_rollouts import SERVICE
from sglang_topp_client.requests.prompts import Messages
from sglang_topp_client.transport.http import HttpClient, ServerConfig

__all__ = ["Endpoint", "Kind"]

Kind: TypeAlias = Literal["sidecar", "sglang"]

_INFO_PATHS: dict[Kind, str] = {"sidecar": "/info", "sglang": "/server_info"}
# A sidecar answers `/healthz` at once, and SGLang answers `/model_info` at once, even while the engine is
# paused. SGLang's `/health` does not answer at once, because `/health` generates a token.
_PROBE_PATHS: dict[Kind, str] = {"sidecar": "/healthz", "sglang": "/model_info"}
_PROBE_TIMEOUT_S = 10.0
# SGLang's scheduler answers `/server_info` only between two steps, so a short time limit would expire while
# the scheduler is busy.
_INFO_TIMEOUT_S = 30.0
# A new engine compiles kernels during its first request, so a short time limit would expire too early.
_FIELD_CHECK_TIMEOUT_S = 120.0
# A sidecar answers `/abort` only after its engine has stopped the request, so a short time limit would expire
# too early.
_SIDECAR_ABORT_TIMEOUT_S = 10.0


class Endpoint:
    """One server, used from one event loop.

    Args:
        config: the server's connection settings.
        kinds: maps the `base_url` of a server to its kind, `"sidecar"` or `"sglang"`, once the kind is known.
            All event loops share this mapping.
        max_long_messages: how many long messages the client reads at once from this server; see
            `LongMessageSlots`.
    """

    def __init__(self, config: ServerConfig, kinds: dict[str, Kind], max_long_messages: int) -> None:
        self.base_url = config.base_url
        self._key_suffix = hashlib.blake2s(config.base_url.rstrip("/").encode(), digest_size=4).hexdigest()
        self._http = HttpClient(config, max_long_messages)
        self.abort_delivery = AbortDelivery(self._abort_engine_request)
        self._health = HealthCheck(self._is_answering, config.base_url)
        self._kinds = kinds
        self._kind_lock = asyncio.Lock()

    def issued(self, routing_key: str) -> bool:
        """Return whether this server generated the rollout whose `Rollout.routing_key` is `routing_key`."""
        return routing_key.endswith(f"-{self._key_suffix}")

    def routing_key(self, earlier: str) -> str:
        """Return the value of the header `X-SMG-Routing-Key` for a request to this server.

        Gateways send requests with the same key to the same worker.

        Args:
            earlier: the routing key of the rollout that the request continues or scores, or empty. The part
                of the returned key before the `-` comes from `earlier`, or is random if `earlier` is empty.
                The part after the `-` identifies this server.
        """
        return f"{earlier.partition('-')[0] or secrets.token_hex(8)}-{self._key_suffix}"

    async def kind(self) -> Kind:
        """Return `"sidecar"` or `"sglang"`. If the server's kind is unknown, send one `GET /info`.

        Raises:
            SglangToppError: the server did not answer, or refused the request.
        """
        async with self._kind_lock:
            if (known := self._kinds.get(self.base_url)) is None:
                known = self._kinds[self.base_url] = "sidecar" if await self._is_sidecar() else "sglang"
            return known

    async def info(self) -> dict[str, Any]:
        """Return the answer of a sidecar's `/info` or of SGLang's `/server_info`.

        Raises:
            SglangToppError: the server sends no answer, an error, or an answer that is not a JSON object.
        """
        path = _INFO_PATHS[await self.kind()]
        info = await self._http.request_json("GET", path, timeout_s=_INFO_TIMEOUT_S)
        if not isinstance(info, dict):
            raise WireError(path, f"got {type(info).__name__}, expected an object")
        return info

    async def check_fields(self) -> None:
        """Check that request fields reach the engine, and that answer fields reach the client.

        A sidecar checks its own engine, so the client asks a sidecar only whether the sidecar is ready.

        Raises:
            WireError: a field was lost; the error's `field` and message name the field.
            ServerError: the sidecar is not ready.
            SglangToppError: the server did not answer, or refused the request.
        """
        if await self.kind() == "sidecar":
            info = await self.info()
            if info.get("ready") is not True:
                raise ServerError(f"{self.base_url} is not ready: {info.get('reason')}")
            return
        for body in field_check_requests():
            try:
                answer = await self._http.request_json(
                    "POST", "/generate", body, timeout_s=_FIELD_CHECK_TIMEOUT_S
                )
            except BadRequestError as error:
                if not any(name in body and name in str(error) for name in REFUSABLE):
                    raise
            else:
                check_fields_of_answer(self.base_url, body, answer)

    @asynccontextmanager
    async def post(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str], on_received: Callable[[], None]
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Send a POST request with `HttpClient.post`, while a health check watches the server.

        Raises:
            TransportError: the server hangs.
            SglangToppError: as for `HttpClient.post`.
        """

        def received() -> None:
            self._health.note_received()
            on_received()

        async with (
            self._health.watch(),
            self._http.post(path, body, headers=headers, on_received=received) as messages,
        ):
            yield messages

    async def apply_chat_template(self, messages: Messages) -> list[int]:
        """Return the token ids of chat messages. The server must be an engine, not a sidecar.

        Raises:
            BadRequestError: the template refuses the messages, or the server lacks the route.
            SglangToppError: the server did not answer with token ids.
        """
        try:
            answer = await self._http.request_json(
                "POST", sglang_tokenize.PATH, sglang_tokenize.body(messages), timeout_s=_INFO_TIMEOUT_S
            )
        except BadRequestError as error:
            raise BadRequestError(
                f"prompts: the engine does not turn these chat messages into token ids: {error}; apply the"
                " chat template with the model's tokenizer and give the ids",
                status=error.status,
                body=error.body,
            ) from error
        return sglang_tokenize.prompt_ids(answer)

    async def abort(self, request_id: str) -> int:
        """Ask the server to abort a request, and return how many requests a sidecar says that it aborted.

        An engine does not say whether it knew the id, and its aborts are not counted.

        Args:
            request_id: the request's id on this server: for an engine, the engine's id; for a sidecar, the
                `request_id` that the sidecar received.
        """
        if await self.kind() == "sglang":
            await self._abort_engine_request(request_id)
            return 0
        try:
            answer = await self._abort_by_sidecar({"request_id": request_id})
        except BadRequestError as error:
            # Older sidecars have no `/abort`. An older sidecar aborts a request when the request's connection
            # closes.
            if error.status not in (404, 405):
                raise
            return 0
        count = answer.get("aborted") if isinstance(answer, dict) else None
        return count if type(count) is int else 0

    async def abort_all(self) -> None:
        """Ask the server to abort every request in the engine."""
        if await self.kind() == "sidecar":
            await self._abort_by_sidecar({"all": True})
            return
        await self._http.request_json(
            "POST", "/abort_request", {"abort_all": True}, timeout_s=abort_delivery.TIMEOUT_S
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _abort_engine_request(self, engine_id: str) -> None:
        await self._http.request_json(
            "POST", "/abort_request", {"rid": engine_id}, timeout_s=abort_delivery.TIMEOUT_S
        )

    async def _abort_by_sidecar(self, body: dict[str, Any]) -> Any:
        return await self._http.request_json("POST", "/abort", body, timeout_s=_SIDECAR_ABORT_TIMEOUT_S)

    async def _is_answering(self) -> bool:
        path = _PROBE_PATHS[self._kinds.get(self.base_url, "sglang")]
        return await self._http.is_answering(path, timeout_s=_PROBE_TIMEOUT_S)

    async def _is_sidecar(self) -> bool:
        try:
            info = await self._http.request_json("GET", "/info", timeout_s=_PROBE_TIMEOUT_S)
        except BadRequestError as error:
            if error.status not in (404, 405):
                raise
            return False
        return isinstance(info, dict) and info.get("service") == SERVICE
