import pytest

from sglang_topp import errors
from sglang_topp_server.problems import answer_of, as_known_error, headers_of, status_of, upstream_error


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (errors.BadRequestError("x", status=400), "BadRequestError", 400),
        (errors.BadRequestError("x", status=422), "BadRequestError", 400),
        (errors.BadRequestError("x", status=413), "BadRequestError", 413),
        (errors.BadRequestError("x", status=None), "BadRequestError", 400),
        # Not about the caller's request: the sidecar asked for a path that this engine does not have.
        (errors.BadRequestError("x", status=404), "ServerError", 502),
        (errors.AuthenticationError("x", status=401), "ServerError", 502),
        (errors.OverloadedError("x"), "OverloadedError", 429),
        (errors.ServerError("x", status=500), "ServerError", 502),
        (errors.ServerError("x", status=503), "ServerError", 502),
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
def test_what_the_engine_says_becomes_an_answer(error, kind, status):
    told = upstream_error(error)

    assert status_of(told) == status
    answer = answer_of(told)["error"]
    assert (answer["type"], answer["status"]) == (kind, status)
    assert "x" in answer["message"]


def test_no_own_error_lacks_a_status():
    for name in errors.__all__:
        kind = getattr(errors, name)
        for made in ("f", "x"), ("x",):
            try:
                error = kind(*made)
            except TypeError:
                continue
            assert 400 <= status_of(error) < 600


@pytest.mark.parametrize(("asked_s", "told"), [(None, "1"), (0.0, "1"), (0.2, "1"), (1.5, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_and_never_now(asked_s, told):
    assert headers_of(errors.OverloadedError("x", retry_after_s=asked_s)) == {"Retry-After": told}


def test_an_accident_is_named():
    error = as_known_error(ZeroDivisionError("division by zero"))
    assert status_of(error) == 500
    assert str(error) == "the sidecar failed: ZeroDivisionError: division by zero"
