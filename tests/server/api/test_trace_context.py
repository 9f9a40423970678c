"""`traceparent` and `tracestate` of a caller reach the engine, through the client and the sidecar."""

import asyncio

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from sglang_topp_client import AsyncRolloutClient, RolloutClient

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def parent_of(number):
    return f"00-{number:032x}-{number:016x}-01"


def span_of(number):
    context = SpanContext(number, number, True, TraceFlags(1), TraceState([("vendor", str(number))]))
    return use_span(NonRecordingSpan(context))


def sent(engine):
    """The trace headers of the requests that the engine got, in their order."""
    names = ("traceparent", "tracestate")
    return [
        {name: engine.headers[body["rid"]][name] for name in names if name in engine.headers[body["rid"]]}
        for body in engine.bodies
    ]


@pytest.mark.parametrize("route", ["rollouts", "scores"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_sidecar_passes_a_trace_on(sidecar, engine, route, stream):
    sidecar.http.headers.update({"Traceparent": PARENT, "Tracestate": "a=1,b=2"})
    answer = getattr(sidecar, route)(
        ["ab", "cd"] if route == "rollouts" else [[5, 6, 7], [5, 6]], stream=stream
    )
    assert answer.status_code == 200
    assert sent(engine) == [{"traceparent": PARENT, "tracestate": "a=1,b=2"}] * 2


def test_requests_of_one_connection_keep_their_own_traces(sidecar, engine):
    for number in (1, 2):
        sidecar.http.headers["traceparent"] = parent_of(number)
        sidecar.rollouts()
    del sidecar.http.headers["traceparent"]
    sidecar.rollouts()
    assert sent(engine) == [{"traceparent": parent_of(1)}, {"traceparent": parent_of(2)}, {}]


@pytest.mark.parametrize("parent", ["", "00", PARENT.upper(), f"{PARENT}-é", "00-" + "0" * 6000])
def test_a_wrong_trace_does_no_harm(sidecar, parent):
    sidecar.http.headers.update({"traceparent": parent.encode("latin-1"), "tracestate": b"\xe9\t,,="})
    assert sidecar.rollouts().status_code == 200


@pytest.mark.parametrize("where", ["engine", "sidecar"])
def test_the_client_sends_the_span_of_its_caller(request, engine, where):
    url = request.getfixturevalue(where).url
    with RolloutClient(url) as client:
        for number in (3, 4):
            with span_of(number):
                client.generate("ab")
        client.generate("ab")
    assert sent(engine) == [
        {"traceparent": parent_of(3), "tracestate": "vendor=3"},
        {"traceparent": parent_of(4), "tracestate": "vendor=4"},
        {},
    ]


async def test_concurrent_calls_keep_their_own_spans(engine):
    async with AsyncRolloutClient(engine.url) as client:

        async def call(number):
            with span_of(number):
                (rollout,) = await client.generate("ab")
            return rollout.request_id, parent_of(number)

        for request_id, parent in await asyncio.gather(*map(call, range(1, 9))):
            assert engine.headers[request_id]["traceparent"] == parent


def test_a_clients_own_headers_are_kept(engine):
    with RolloutClient(engine.url, headers={"traceparent": PARENT}) as client:
        client.generate("ab")
    assert sent(engine) == [{"traceparent": PARENT}]
