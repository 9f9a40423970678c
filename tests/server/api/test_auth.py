"""The API key: which routes need it, and when it is checked."""

import socket

import pytest

KEY = "s3cret-ключ"


@pytest.fixture
def guarded(engine, start):
    return start(engine.url, api_key=KEY)


def bearer(key):
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("other"),
        bearer(KEY + "x"),
        {"Authorization": KEY.encode()},
        {"Authorization": b"Bearer"},
        {"Authorization": b"Basic " + KEY.encode()},
    ],
)
def test_other_routes_need_the_key(guarded, headers):
    for path in ("/rollouts", "/info", "/metrics", "/openapi.json", "/docs", "/nowhere"):
        answer = guarded.http.get(path, headers=headers)

        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert KEY not in answer.text


def test_the_right_key_is_accepted(guarded):
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = guarded.http.get("/info", headers={"Authorization": f"{scheme} {KEY}".encode()})
        assert answer.status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_routes_need_no_key(guarded, method, path):
    assert guarded.http.request(method, path).status_code == 200


def test_the_body_is_not_read_before_the_key_is_checked(guarded):
    """A caller that waits for `100 Continue` is refused at once and sends nothing."""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=30) as connection:
        connection.sendall(
            b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")


def test_refusals_are_counted(guarded):
    guarded.http.post("/rollouts", content=b"{}")

    guarded.http.headers.update(bearer(KEY))
    assert guarded.metric("sglang_topp_requests_total", outcome="rejected") == 1
    assert guarded.metric("sglang_topp_errors_total", status="401", type="AuthenticationError") == 1


def test_the_engine_gets_its_own_key_and_never_the_callers(engine, start):
    engine.api_key = "engine-key"
    sidecar = start(engine.url, api_key=KEY, engine_api_key="engine-key")

    sidecar.http.headers.update(bearer(KEY))
    assert sidecar.rollouts("a").status_code == 200
    assert engine.authorizations == {"Bearer engine-key"}


def test_an_engine_that_refuses_the_sidecars_key_is_named(engine, start):
    engine.api_key = "engine-key"
    sidecar = start(engine.url, wait=False)

    answer = sidecar.rollouts("a")
    assert answer.status_code == 503
    assert "SGLANG_TOPP_ENGINE_API_KEY" in answer.json()["error"]["message"]
