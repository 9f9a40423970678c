"""Headers that the caller adds to requests, and TLS with a certificate that the test creates."""

import datetime
import ipaddress
import pickle
import ssl
from contextlib import ExitStack

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient
from tests.client import conftest as fakes
from tests.client.conftest import answers

HEADERS = {"X-Tenant": "rl-7", "User-Agent": "trainer/1", "Authorization": "Basic Zm9v"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The paths of a self-signed certificate for 127.0.0.1 and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now - day, now + day
        )
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths = [tmp_path_factory.mktemp("tls") / name for name in ("certificate.pem", "key.pem")]
    paths[0].write_bytes(made.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return tuple(map(str, paths))


@pytest.fixture
def trusting(certificate):
    return ssl.create_default_context(cafile=certificate[0])


@pytest.fixture
def over_tls(certificate):
    """Serve a fake server over TLS as well, and return its address."""
    with ExitStack() as stack:
        files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
        yield lambda server, **options: stack.enter_context(server.serve(**files, **options))


@pytest.fixture
def pushable(engine):
    """An engine that takes weights."""
    engine.paths["/server_info"] = answers({"model_path": "/served", "sglang_topp": {"is_paused": False}})
    engine.paths["/sglang_topp/checkpoint_tensors"] = answers({"tensors": {"a": [1]}, "optional": []})
    for path in ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"):
        engine.paths[path] = answers({"success": True})
    return engine


async def test_every_request_has_the_headers(served, no_leftovers):
    async with AsyncRolloutClient(served.url, headers=HEADERS) as client:
        await client.generate([[5], [6]])
        await client.score([5, 6])
        await client.server_info()
        await client.abort("0" * 32)
    assert len({asked.path for asked in served.asked}) >= 4
    expected = {name.lower(): value for name, value in HEADERS.items()} | {"accept-encoding": "identity"}
    assert all(asked.headers.items() >= expected.items() for asked in served.asked)


async def test_headers_pickle_and_are_never_shown(engine):
    client = AsyncRolloutClient(engine.url, headers={"X-Key": "s3cret"})
    assert "s3cret" not in repr(client) + repr(client._configs) + repr(client._weights.configs)
    async with pickle.loads(pickle.dumps(client)) as client:
        await client.generate([5])
    assert engine.asked[-1].headers["x-key"] == "s3cret"


async def test_requests_go_over_tls(served, over_tls, trusting, no_leftovers):
    async with AsyncRolloutClient(over_tls(served), ssl=trusting) as client:
        (rollout,) = await client.generate([5], top_logprobs_p=0.9)
        (score,) = await client.score([5, 6], top_logprobs_p=0.5)
    assert rollout.candidates == fakes.sample([5], 0).candidates
    assert score.candidates == fakes.score([5, 6]).candidates


def test_a_push_has_the_headers_and_goes_over_tls(pushable, sidecar, over_tls, trusting):
    engine_url = over_tls(pushable)
    with RolloutClient(sidecar.url, engine_url=engine_url, headers=HEADERS, ssl=trusting) as client:
        client.push_weights("/weights/8", version="8")
        assert len(client.generate([5])) == 1
    assert pushable.calls == []
    assert {asked.headers["x-tenant"] for asked in pushable.asked} == {"rl-7"}
    assert len(pushable.of("/update_weights_from_disk")) == 1


async def test_a_client_certificate_is_presented(engine, over_tls, certificate, trusting):
    url = over_tls(engine, ssl_ca_certs=certificate[0], ssl_cert_reqs=ssl.CERT_REQUIRED)
    async with AsyncRolloutClient(url, kind="sglang", ssl=trusting, max_retries=0) as client:
        with pytest.raises(errors.TransportError):
            await client.generate([5])
    trusting.load_cert_chain(*certificate)
    async with AsyncRolloutClient(url, kind="sglang", ssl=trusting) as client:
        assert len(await client.generate([5])) == 1


async def test_an_unknown_certificate_is_refused_and_the_error_says_what_to_do(engine, over_tls):
    async with AsyncRolloutClient(over_tls(engine), kind="sglang", max_retries=0) as client:
        with pytest.raises(errors.TransportError, match=r"not trusted: .*self-signed.*; name its CA .*ssl="):
            await client.generate([5])
    assert engine.asked == []


def test_the_default_reads_ssl_cert_file(engine, over_tls, certificate, monkeypatch):
    """aiohttp makes its default context once per process, so this one needs a process of its own."""
    code = (
        "import sys; from sglang_topp_client import RolloutClient\n"
        "with RolloutClient(sys.argv[1], kind='sglang', max_retries=0) as client:\n"
        "    print(len(client.generate([5])))"
    )
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    assert fakes.run_python(code, over_tls(engine)).stdout == "1\n"


def test_an_ssl_context_does_not_pickle(trusting):
    with pytest.raises(errors.InvalidInputError, match="ssl: got an SSLContext, which does not pickle"):
        pickle.dumps(RolloutClient("https://127.0.0.1:1", ssl=trusting))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"headers": [("X-A", "1")]}, "headers: got list"),
        ({"headers": {"X A": "1"}}, "headers: got the name 'X A'"),
        ({"headers": {"": "1"}}, "headers: got the name ''"),
        ({"headers": {5: "1"}}, "headers: got the name 5"),
        ({"headers": {"X-A": 1}}, "headers: the value of X-A: expected printable ASCII"),
        ({"headers": {"X-A": "s3cret\r\nX-B: 1"}}, "headers: the value of X-A: expected printable ASCII"),
        ({"headers": {"X-A": "s3crét"}}, "headers: the value of X-A"),
        ({"headers": {"X-A": " s3cret"}}, "headers: the value of X-A"),
        ({"headers": {"content-type": "text/plain"}}, "headers: got content-type, which the client sets"),
        ({"headers": {"X-SMG-Routing-Key": "a"}}, "headers: got X-SMG-Routing-Key, which the client sets"),
        ({"headers": {"authorization": "Basic x"}, "api_key": "k"}, "headers: got Authorization beside"),
        (
            {"headers": {"authorization": "Basic x"}, "engine_url": "https://e", "engine_api_key": "k"},
            "headers: got Authorization beside",
        ),
        ({"ssl": True}, "ssl: got bool, expected an ssl.SSLContext"),
        ({"ssl": "ca.pem"}, "ssl: got str, expected an ssl.SSLContext"),
        ({"ssl": ssl.create_default_context(), "base_url": "http://a"}, "ssl: got TLS settings, but no"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(errors.InvalidInputError, match=message) as caught:
        AsyncRolloutClient(**({"base_url": "https://127.0.0.1:1"} | arguments))
    assert "s3cr" not in str(caught.value)
