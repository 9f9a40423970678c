"""The order of a push's steps over several engines, and the engines' state after a failed step."""

import asyncio
import pickle

import pytest

from sglang_topp.errors import BadRequestError, InvalidInputError, TransportError, WeightPushError
from sglang_topp_client import AsyncRolloutClient, RolloutClient, WeightPusher
from tests.client.weight_push.conftest import INFO, TENSORS

pytestmark = pytest.mark.usefixtures("no_leftovers")

PAUSE, FLUSH, CONTINUE = "/pause_generation", "/flush_cache", "/continue_generation"
UPDATE = "/update_weights_from_disk"


@pytest.fixture
def engines(start_engines):
    """Three servers."""
    return start_engines(UPDATE, PAUSE, CONTINUE, tp_sizes=(1, 1, 1), tensors={"a": [1]})


def client_of(engines, **options):
    return AsyncRolloutClient([engine.url for engine in engines], **options)


def steps(engine):
    return [asked.path for asked in engine.asked]


async def refuse(asked, reply):
    await reply.json({"success": False, "message": "not today"}, 400)


async def unavailable(asked, reply):
    await reply.json({"error": "try again"}, 503)


async def drop(asked, reply):
    await reply.start()
    raise ConnectionError  # uvicorn drops the connection


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place"])
async def test_every_engine_gets_the_steps_in_order(engines, pause):
    async with client_of(engines, api_key="k3y") as client:
        await client.push_weights("/weights/8", version="8", pause=pause)
    flush = [] if pause == "in_place" else [FLUSH]
    for engine in engines:
        assert steps(engine) == ["/server_info", TENSORS, TENSORS, PAUSE, *flush, UPDATE, *flush, CONTINUE]
        assert engine.of(PAUSE)[0].body == {"mode": pause}
        assert engine.calls == [{"model_path": "/weights/8", "weight_version": "8", "flush_cache": False}]
        assert {asked.headers["authorization"] for asked in engine.asked} == {"Bearer k3y"}


@pytest.mark.parametrize("fault", [refuse, drop])
async def test_a_partly_failed_push_names_each_version_and_leaves_all_paused(engines, fault):
    engines[1].script = [fault]
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError) as failed:
            await client.push_weights("/weights/8", version="8")
        error = pickle.loads(pickle.dumps(failed.value))
        assert error.weight_versions == {engines[0].url: "8", engines[1].url: None, engines[2].url: "8"}
        for engine in engines:
            assert engine.url in str(error)
            assert CONTINUE not in steps(engine)
        await client.push_weights("/weights/8", version="8")
        assert [engine.of(CONTINUE) != [] for engine in engines] == [True] * 3


async def test_an_answer_without_success_is_a_failure(engines):
    async def claim(asked, reply):
        await reply.json({"message": "perhaps"})

    engines[2].script = [claim]
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError, match="2 of 3 engines"):
            await client.push_weights("/weights/8", version="8")


@pytest.mark.parametrize(("path", "sent"), [(PAUSE, 0), (FLUSH, 0), (CONTINUE, 1)])
async def test_a_step_that_fails_on_one_engine_stops_all(engines, path, sent):
    engines[1].paths[path] = refuse
    expected = WeightPushError if sent else BadRequestError
    async with client_of(engines) as client:
        with pytest.raises(expected, match=engines[1].url) as failed:
            await client.push_weights("/weights/8", version="8")
    assert [len(engine.calls) for engine in engines] == [sent] * 3
    if sent:
        assert set(failed.value.weight_versions.values()) == {"8"}
    else:
        assert failed.value.__notes__ == ["no weights were loaded; all engines continue"]
        assert all(engine.of(CONTINUE) for engine in engines)
    if path == FLUSH:
        assert "0.5.21" in str(failed.value)


@pytest.mark.parametrize("path", ["/server_info", TENSORS, PAUSE, FLUSH, CONTINUE])
@pytest.mark.parametrize("fault", [unavailable, drop])
async def test_a_step_that_may_be_repeated_is_repeated(engines, path, fault):
    accept = engines[1].paths[path]

    async def fail_once(asked, reply):
        engines[1].paths[path] = accept
        await fault(asked, reply)

    engines[1].paths[path] = fail_once
    async with client_of(engines) as client:
        await client.push_weights("/weights/8", version="8")
    assert [len(engine.calls) for engine in engines] == [1] * 3


async def test_engines_that_were_paused_before_stay_paused(engines):
    async def paused(asked, reply):
        await reply.json(INFO | {"sglang_topp": {"is_paused": True}})

    engines[0].paths["/server_info"] = paused
    engines[1].paths[PAUSE] = refuse
    async with client_of(engines) as client:
        with pytest.raises(BadRequestError, match="not today") as failed:
            await client.push_weights("/weights/8", version="8")
    assert failed.value.__notes__ == [f"no weights were loaded; these stay paused: {engines[0].url}"]
    assert [len(engine.of(CONTINUE)) for engine in engines] == [0, 1, 1]


async def test_a_cancellation_before_the_weights_are_sent_ends_the_pause(engines):
    is_paused = asyncio.Event()

    async def hang(asked, reply):
        is_paused.set()
        await reply.hung_up()

    engines[2].paths[FLUSH] = hang
    async with client_of(engines) as client:
        push = asyncio.create_task(client.push_weights("/weights/8", version="8"))
        await is_paused.wait()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
    assert [len(engine.of(CONTINUE)) for engine in engines] == [1] * 3
    assert not any(engine.calls for engine in engines)


async def unread(asked, reply):
    await reply.json({"success": False, "message": "Failed to get weights iterator: no such folder."}, 400)


async def test_engines_continue_if_none_could_read_the_folder(engines):
    for engine in engines:
        engine.script = [unread]
    async with client_of(engines) as client:
        with pytest.raises(BadRequestError, match="no such folder") as failed:
            await client.push_weights("/weights/8", version="8")
    assert failed.value.__notes__ == ["no weights were loaded; all engines continue"]
    assert all(engine.of(CONTINUE) for engine in engines)


async def test_engines_stay_paused_if_only_some_could_read_the_folder(engines):
    engines[1].script = [unread]
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError, match=f"{engines[1].url}: old weights; .*no such folder"):
            await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(CONTINUE) for engine in engines)


async def test_with_a_draft_model_a_message_does_not_show_that_nothing_was_loaded(engines):
    async def drafting(asked, reply):
        await reply.json(INFO | {"speculative_algorithm": "EAGLE"})

    for engine in engines:
        engine.script, engine.paths["/server_info"] = [unread], drafting
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError, match="weights unknown"):
            await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(CONTINUE) for engine in engines)


async def test_an_engine_without_the_plugin_is_refused(engines):
    async def unpatched(asked, reply):
        await reply.json({"model_path": "m", "tp_size": 1})

    engines[1].paths["/server_info"] = unpatched
    async with client_of(engines) as client:
        with pytest.raises(InvalidInputError, match=f"{engines[1].url} runs SGLang without sglang-topp"):
            await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(PAUSE) for engine in engines)


async def test_a_cache_that_is_not_flushed_afterwards_is_an_error(engines):
    accept = engines[0].paths[FLUSH]

    async def refuse_the_second(asked, reply):
        await (refuse if engines[0].calls else accept)(asked, reply)

    engines[0].paths[FLUSH] = refuse_the_second
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError, match="not every cache was flushed"):
            await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(CONTINUE) for engine in engines)


async def test_an_engine_that_is_slow_is_an_error(engines):
    async def hang(asked, reply):
        await reply.hung_up()

    engines[0].script = [hang]
    async with client_of(engines) as client:
        with pytest.raises(WeightPushError, match=r"no answer in 3 s"):
            await client.push_weights("/weights/8", version="8", timeout_s=3.0)


async def test_engines_are_checked_before_any_is_paused(engines, sidecar):
    async with AsyncRolloutClient(sidecar.url) as client:
        with pytest.raises(InvalidInputError, match="engine_url"):
            await client.push_weights("/weights/8", version="8")
    engine_urls = [engines[0].url, sidecar.url]
    async with AsyncRolloutClient(sidecar.url, engine_url=engine_urls) as client:
        with pytest.raises(InvalidInputError, match=f"engine_url: {sidecar.url}"):
            await client.push_weights("/weights/8", version="8")
    engines[2].paths["/server_info"] = drop
    async with client_of(engines) as client:
        with pytest.raises(TransportError):
            await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(PAUSE) for engine in engines)


def test_engines_of_a_sidecar_get_their_own_key(engines, sidecar):
    urls = [engine.url for engine in engines]
    with RolloutClient(sidecar.url, engine_url=urls, api_key="sidecar") as client:
        client.push_weights("/weights/8", version="8")
        assert "authorization" not in engines[0].asked[-1].headers
    client = RolloutClient(sidecar.url, engine_url=urls, api_key="sidecar", engine_api_key="engine")
    with pickle.loads(pickle.dumps(client)) as client:
        client.push_weights("/weights/9", version="9")
        assert engines[0].asked[-1].headers["authorization"] == "Bearer engine"
    assert sidecar.asked == []


async def test_weights_are_pushed_without_a_client(engines):
    weights = WeightPusher([engine.url for engine in engines], api_key="k3y")
    await weights.pause("abort")
    await weights.push("/weights/8", version="8")
    await weights.continue_generation()
    for engine in engines:
        assert [asked.body for asked in engine.of(PAUSE)] == [{"mode": "abort"}, {"mode": "retract"}]
        assert [len(engine.of(path)) for path in (UPDATE, CONTINUE)] == [1, 2]
        assert {asked.headers["authorization"] for asked in engine.asked} == {"Bearer k3y"}


async def test_one_client_pushes_once_at_a_time(engines):
    async with client_of(engines) as client:
        pushes = [client.push_weights("/weights/8", version=version) for version in ("8", "9")]
        outcomes = await asyncio.gather(*pushes, return_exceptions=True)
        assert outcomes[0] is None
        assert "already" in str(outcomes[1])
        await client.push_weights("/weights/9", version="9")


class SavedModel:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def save_pretrained(self, folder):
        (self.folder / "where").write_text(folder)


async def test_a_model_is_saved_to_a_folder_that_goes_away(engines, tmp_path):
    async with client_of(engines) as client:
        await client.push_weights(SavedModel(folder=tmp_path), version="8")
    folder = (tmp_path / "where").read_text()
    assert {call["model_path"] for engine in engines for call in engine.calls} == {folder}
    assert not tmp_path.joinpath(folder).exists()


async def test_a_path_that_exists_here_becomes_absolute(engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    async with client_of(engines) as client:
        await client.push_weights("weights", version="8")
        await client.push_weights("org/model", version="9")
    assert [call["model_path"] for call in engines[0].calls] == [str(tmp_path / "weights"), "org/model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": 5}, "weights: got int"),
        ({"weights": b"weights"}, "weights: got bytes"),
        ({"weights": ""}, "weights: got ''"),
        ({"weights": SavedModel(peft_config={"default": 1})}, "merge_and_unload"),
        ({"version": 3}, "version: got 3"),
        ({"version": ""}, "version: got ''"),
        ({"version": "a\nb"}, "version: got "),
        ({"via": "pigeon"}, "via: got 'pigeon'"),
        ({"pause": "rest"}, "pause: got 'rest'"),
        ({"partial": 1}, "partial: got 1"),
        ({"timeout_s": 0}, "timeout_s: got 0"),
    ],
)
async def test_wrong_arguments_are_refused_before_anything_is_sent(engines, arguments, message):
    arguments = {"weights": "w", "version": "8", **arguments}
    async with client_of(engines) as client:
        with pytest.raises(InvalidInputError, match=message):
            await client.push_weights(arguments.pop("weights"), **arguments)
    assert not any(engine.asked for engine in engines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine_url": "localhost:30000"}, "engine_url: got 'localhost:30000'"),
        ({"engine_url": []}, "engine_url: got none"),
        ({"engine_url": ["http://a", "http://a/"]}, "engine_url: got 'http://a' twice"),
        ({"engine_api_key": " k"}, "engine_api_key: expected"),
    ],
)
def test_wrong_engines_are_refused(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        AsyncRolloutClient("http://127.0.0.1:1", **arguments)
