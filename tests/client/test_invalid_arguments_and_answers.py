"""Invalid arguments and invalid answers: each raises one of our errors, which names the field."""

import json
from contextlib import suppress
from functools import partial

import numpy as np
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import errors
from sglang_topp.errors import describe
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.protocols.sidecar import SidecarExchange
from sglang_topp_client.requests import build_sample_requests
from sglang_topp_client.value_checks import fresh_id, truncate
from sglang_topp_client.wire.error_json import error_from_json
from sglang_topp_client.wire.records import from_record, to_record
from tests.client import conftest as fakes

HUGE = 10**400


def nested(depth, of=list):
    value = of()
    for _ in range(depth):
        value = [value] if of is list else {"a": value}
    return value


# -- arguments -------------------------------------------------------------------------------------

ITSELF: list = []
ITSELF.append(ITSELF)

NUMBERS = [HUGE, -HUGE, 10**5000, 2**63, float("inf"), float("nan"), True]
VALUES = [
    *(*NUMBERS, b"x", bytearray(b"xy"), memoryview(b"xy")),
    *("\ud800", ["\ud800"], [b"x"], [bytearray(b"xy")], [np.True_], [[HUGE]], [10**5000]),
    *(nested(70), nested(2000), nested(100_000), nested(100_000, dict), ITSELF, object(), int, iter([1])),
    *(np.complex64(1), np.datetime64("2020"), np.array([1 + 2j]), np.array([1, 2], object), np.bool_(True)),
    *({"n": HUGE}, {"n": 10**5000}, {"n": 10**9}, {"a": HUGE}, {"a": 10**5000}, {"a": "\ud800"}),
    *({"a": ITSELF}, {"a": nested(100_000)}, {"a": nested(100_000, dict)}, {"a": {1}}, {"a": np.float32(1)}),
    *([{"n": HUGE}], {1, 2}, {0.5: 1}, {"\ud800": 1}),
]


def may_refuse(make, value):
    """Return whether `make` refuses the value. It may raise only our errors, with a short message."""
    words = ""
    try:
        make(value)
    except errors.InvalidInputError as error:
        words = str(error)
    assert len(words) < 2000
    return words != ""


def kind(value):
    """Return a name for the test, because Python cannot print all of these values."""
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=kind)
def test_every_argument_is_refused_by_name(value):
    client = AsyncRolloutClient("http://127.0.0.1:9", kind="sglang")
    assert may_refuse(client.stream, value)
    assert may_refuse(lambda v: client.stream([1], v), value)
    assert may_refuse(lambda v: client.stream([1], top_logprobs_p=v), value)
    for name in ("progress", "request_id"):
        assert may_refuse(lambda v, name=name: client.stream([1], **{name: v}), value) or value is True
    for fields in (value, [value]):
        may_refuse(lambda v: client.stream([1], top_logprobs_p=0.5, return_fields=v), fields)
    may_refuse(lambda v: client.stream([1], timeout_s=v), value)
    may_refuse(lambda v: client.stream([1], {"stop": v}), value)
    for name in ("base_url", "kind", "api_key", "max_connections", "max_retries", "max_message_bytes"):
        may_refuse(lambda v, name=name: AsyncRolloutClient(**{"base_url": "http://h:1"} | {name: v}), value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"custom_params": nested(100_000)}, "more than 100 levels"),
        ({"custom_params": nested(100_000, dict)}, "more than 100 levels"),
        ({"custom_params": ITSELF}, "more than 100 levels"),
        ({"top_k": HUGE}, "64 bits"),
        ({"top_k": 10**5000}, "64 bits"),
        ({"stop": "\ud800"}, "surrogate"),
        ({"logit_bias": {"\udfff": 1.0}}, "surrogate"),
        ({"n": HUGE}, "1048576 at most"),
        ({"n": 10**5000}, "at most"),
        ({"n": 1_000_000}, "at most"),
    ],
    ids=kind,
)
def test_parameters_that_cannot_be_sent_are_named(params, words):
    with pytest.raises(errors.InvalidInputError, match=rf"^sampling_params.*{words}"):
        build_sample_requests([[1], [2]], params, None)


def test_parameters_of_a_realistic_depth_pass():
    params = {"custom_params": nested(90, dict), "top_k": 2**63 - 1, "sampling_seed": -(2**63)}
    assert build_sample_requests([1], params, None)[0].sampling_params == params


WRONG_IDS = {
    "lines": ["a\nb", "a\r", "\x85", "\u2028"],
    "control": ["\x00", "a\x1b[2J", "\x7f", "\ud800"],
    "other": ["", "x" * 513, b"mine", 5, ["mine"]],
}


@pytest.mark.parametrize("request_id", [one for group in WRONG_IDS.values() for one in group])
async def test_a_request_id_is_printable_text_of_some_length(engine, request_id):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        with pytest.raises(errors.InvalidInputError, match="request_id"):
            client.stream([1], request_id=request_id)
        with pytest.raises(errors.InvalidInputError, match="request_id"):
            await client.generate([1], request_id=request_id)
        with pytest.raises(errors.InvalidInputError, match="request_id"):
            await client.abort(request_id)
    assert engine.asked == []


@pytest.mark.parametrize("request_id", ["step 7, größe/№ 3", "x" * 512])
async def test_call_ids_begin_with_the_request_id_and_keep_its_limit(engine, sidecar, request_id):
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        await client.generate([[1], [2]], request_id=request_id)
        # A caller may pass an engine's id to `abort`.
        await client.abort(engine.calls[0]["rid"])
    async with AsyncRolloutClient(sidecar.url, kind="sidecar") as client:
        await client.generate([1], request_id=request_id)
    ids = [body["rid"] for body in engine.calls] + [body["request_id"] for body in sidecar.calls]
    assert len(set(ids)) == 3
    for each in ids:
        assert len(each) <= 512
        assert each.startswith(request_id[:400])
    assert len({fresh_id(request_id) for _ in range(50)}) == 50


def test_values_in_errors_are_short():
    assert truncate("x" * 1000, 10) == "xxxxxxxxxx… (1000 characters)"
    assert describe(1.5) == "1.5"
    for value in (10**5000, nested(100_000), ITSELF, nested(100_000, dict)):
        assert len(describe(value)) < 300
        assert len(truncate(value, 200)) < 300


# -- answers ---------------------------------------------------------------------------------------

HOSTILE = [
    *(None, True, 0, -1, 2**31, 2**63, HUGE, -HUGE, 1.5, 1e39, -1e308, float("inf"), float("nan")),
    *("", "x", "\ud800", "\x00", "AAAA", "AAA=", "!!", "x" * 5000),
    *([], {}, [None], [[]], [1], ["x"], [HUGE], [-1], [1e300], [[1, 2, 3]]),
    *([[-1e39, 1, None]], [[HUGE, 1, None]], [[1, HUGE, None]], nested(300), nested(300, dict)),
    *({"type": ["x"]}, {"type": "abort", "message": nested(400), "status_code": HUGE}, {"latency_s": HUGE}),
]


def places(value, at=()):
    """Yield every place inside `value`."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*at, key))


@st.composite
def spoiled(draw, value):
    """Return `value` with up to three places changed or removed."""
    chosen = draw(st.lists(st.sampled_from(list(places(value))), min_size=1, max_size=3, unique=True))
    for place in chosen:
        new = ... if draw(st.integers(0, 4)) == 0 else draw(st.sampled_from(HOSTILE))
        # The place may be inside a value that was changed before.
        with suppress(KeyError, IndexError, TypeError):
            value = fakes.changed(value, place, new)
    return value


def read(reader, value):
    """Return whether `reader` accepts the value. Any other error than ours fails, and so does a warning."""
    caught = None
    try:
        reader(value)
    except errors.SglangToppError as error:
        caught = error
    assert len(str(caught)) < 20_000
    return caught is None


def of_engine(n=1, p=0.9):
    return SglangExchange(*build_sample_requests([[5, 6]], {"n": n}, p), request_id="mine")


def line_of(chunk):
    return b"data: " + json.dumps(chunk).encode()


def of_sidecar(p=0.9):
    return SidecarExchange(*build_sample_requests([[5, 6]], None, p), request_id="mine", max_bytes=1 << 30)


def as_lists(chunk, sets):
    """Return the chunk with its sets as JSON lists."""
    meta = {k: v for k, v in chunk["meta_info"].items() if not k.startswith("output_top_p")}
    rows = [[[float(logprob), int(token), None] for token, logprob in zip(*one, strict=True)] for one in sets]
    return chunk | {"meta_info": meta | {"output_top_p_logprobs": rows}}


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_spoiled_record_is_a_named_error(data):
    record = data.draw(spoiled(to_record(fakes.sample([5, 6], 0))))
    read(partial(from_record, Rollout), record)
    line = json.dumps(record).encode()
    for p in (0.9, None):
        read(of_sidecar(p).read, line)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_spoiled_chunk_is_a_named_error(data):
    made = fakes.sample([5, 6], 0)
    whole, first = fakes.chunk(made), fakes.chunk(made, first_token_only=True)
    chunk = data.draw(
        st.sampled_from([whole, first, as_lists(whole, made.candidates)]).flatmap(spoiled), label="chunk"
    )
    line = line_of(chunk)
    read(of_engine().read, line)
    read(of_engine(p=None).read, line)
    one = of_engine(n=2)
    one.read(line_of(first))
    read(one.read, line)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_spoiled_error_is_a_named_error(data):
    kind = data.draw(st.sampled_from(errors.__all__))
    body = {"type": kind, "message": "m", "code": 400, "status": 500, "field": "f"}
    error = data.draw(spoiled({"error": body}))
    line = json.dumps(error).encode()
    assert not read(of_engine().read, b"data: " + line)
    assert not read(of_sidecar().read, line)
    back = error_from_json(error.get("error"))
    assert isinstance(back, errors.SglangToppError)
    status = getattr(back, "status", None)
    assert status is None or 100 <= status < 600


@settings(max_examples=300, deadline=None)
@given(at=st.floats(0, 1), byte=st.integers(0, 255), where=st.sampled_from(["line", "candidates"]))
def test_a_changed_byte_is_a_named_error_or_nothing(at, byte, where):
    made = fakes.sample([5, 6], 0)
    record = to_record(made)
    raw = bytearray(
        json.dumps(record).encode() if where == "line" else pybase64.b64decode(record["candidates"])
    )
    raw[int(at * (len(raw) - 1))] = byte
    if where == "line":
        read(of_sidecar().read, bytes(raw))
        read(of_engine().read, b"data: " + bytes(raw))
    else:
        read(partial(from_record, Rollout), record | {"candidates": pybase64.b64encode(bytes(raw)).decode()})


@pytest.mark.parametrize("depth", range(900, 1000, 3))
def test_deep_nesting_that_repr_cannot_show_is_a_named_error(depth):
    """Nesting may be as deep as Python's recursion limit allows. The error message needs some levels too."""
    deep = b"[" * depth + b"]" * depth
    made = fakes.sample([5, 6], 0)
    chunk = fakes.chunk(made)
    error = {"error": {"message": 1, "type": 1, "code": 1, "status": 1, "field": 1}}
    for value, make, prefix in (
        (chunk, of_engine, b"data: "),
        (as_lists(chunk, made.candidates), of_engine, b"data: "),
        (to_record(made), of_sidecar, b""),
        (error, of_engine, b"data: "),
        (error, of_sidecar, b""),
        ({"done": 1, "rollouts": 1}, of_sidecar, b""),
    ):
        for place in places(value):
            line = json.dumps(fakes.changed(value, place, "@")).encode().replace(b'"@"', deep)
            read(make().read, prefix + line)


@pytest.mark.parametrize("latency_s", [HUGE, float("nan"), float("inf"), 1e300])
def test_a_wrong_latency_is_named(latency_s):
    made = fakes.sample([5, 6], 0)
    with pytest.raises(errors.WireError, match="latency_s"):
        from_record(Rollout, to_record(made) | {"timing": {"latency_s": latency_s}})
    # JSON has no NaN and no infinity.
    words = "e2e_latency" if json.dumps(latency_s)[0] == "1" else "JSON is malformed"
    with pytest.raises(errors.WireError, match=words):
        of_engine().read(line_of(fakes.chunk(made, e2e_latency=latency_s)))


def test_a_clock_that_was_set_back_costs_no_sample():
    ((_, rollout),) = of_engine().read(line_of(fakes.chunk(fakes.sample([5, 6], 0), e2e_latency=-0.5)))
    assert rollout.latency_s == 0.0


def test_an_empty_engine_id_is_refused():
    """SGLang aborts by prefix, so an abort of an empty id would end all requests."""
    one = of_engine(n=2)
    with pytest.raises(errors.WireError, match="id: got '', expected"):
        one.read(line_of(fakes.chunk(fakes.sample([5, 6], 0), first_token_only=True, id="")))
    assert one.open_ids == {}


@pytest.mark.parametrize("answer", [b"[1, 2]", b'"text"', b"5", b"", b"[" * 60_000])
async def test_server_info_that_is_no_object(engine, answer):
    engine.paths["/server_info"] = fakes.sends_bytes(answer, "application/json")
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.WireError, match="/server_info"):
            await client.server_info()


@pytest.mark.parametrize(
    "body",
    [{"error": {"message": nested(300)}}, {"detail": [HUGE] * 9}, {"error": {"type": nested(300)}}, HUGE, []],
)
@pytest.mark.parametrize("retry_after", ["inf", "1e400", "nan", "-5", "9" * 400, "Mon, 99 Foo 0000"])
async def test_a_hostile_refusal(engine, body, retry_after):
    engine.paths["/server_info"] = fakes.answers(body, 429, Retry_After=retry_after)
    async with AsyncRolloutClient(engine.url, kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.OverloadedError) as caught:
            await client.server_info()
    assert caught.value.retry_after_s is None or 0 <= caught.value.retry_after_s < 1e300
