"""Each error class has its HTTP status, `Retry-After`, and message."""

import pytest

from sglang_topp import errors
from sglang_topp_server.error_responses import (
    as_sglang_topp_error,
    error_body,
    error_headers,
    from_engine_error,
    http_status,
)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (errors.BadRequestError("x", status=400), "BadRequestError", 400),
        (errors.BadRequestError("x", status=422), "BadRequestError", 400),
        (errors.BadRequestError("x", status=413), "BadRequestError", 413),
        (errors.BadRequestError("x", status=None), "BadRequestError", 400),
        # The caller's request is valid: the sidecar requested a path that this engine lacks.
        (errors.BadRequestError("x", status=404), "ServerError", 502),
        (errors.AuthenticationError("x", status=401), "ServerError", 502),
        (errors.OverloadedError("x"), "OverloadedError", 429),
        (errors.ServerError("x", status=500), "ServerError", 502),
        # The engine cannot serve now, so the caller may repeat the request later.
        (errors.ServerError("x", status=503), "ServerError", 503),
        (errors.ServerError("x", status=None), "ServerError", 502),
        (errors.ResponseError("x", status=302), "ServerError", 502),
        (errors.RolloutError("x", status=None), "RolloutError", 502),
        (errors.TransportError("x"), "TransportError", 502),
        (errors.RequestTimeoutError("x"), "RequestTimeoutError", 504),
        (errors.WireError("f", "x"), "WireError", 502),
        (errors.SampledTokenMissingError("f", "x"), "SampledTokenMissingError", 502),
        (errors.MissingCandidateSetsError("f", "x"), "MissingCandidateSetsError", 503),
        (errors.PatchError("x"), "PatchError", 503),
        (errors.InvalidInputError("x"), "InvalidInputError", 400),
    ],
)
def test_engine_errors_are_mapped_to_answers(error, kind, status):
    told = from_engine_error(error)

    assert http_status(told) == status
    answer = error_body(told)["error"]
    assert (answer["type"], answer["status"]) == (kind, status)
    assert "x" in answer["message"]


def test_every_error_class_has_a_status():
    for name in errors.__all__:
        kind = getattr(errors, name)
        for made in ("f", "x"), ("x",):
            try:
                error = kind(*made)
            except TypeError:
                continue
            assert 400 <= http_status(error) < 600


@pytest.mark.parametrize(("asked_s", "told"), [(None, "1"), (0.0, "1"), (0.2, "1"), (1.5, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_and_never_now(asked_s, told):
    assert error_headers(errors.OverloadedError("x", retry_after_s=asked_s)) == {"Retry-After": told}


def test_a_503_that_may_pass_says_when_to_come_back():
    assert error_headers(errors.ServerError("x", status=503)) == {"Retry-After": "1"}
    assert error_headers(errors.ServerError("x", status=502)) == {}
    assert error_headers(errors.PatchError("x")) == {}


def test_an_unexpected_exception_is_named():
    error = as_sglang_topp_error(ZeroDivisionError("division by zero"))
    assert http_status(error) == 500
    assert str(error) == "the sidecar failed: ZeroDivisionError: division by zero"
