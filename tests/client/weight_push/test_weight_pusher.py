"""The order of a push's steps over several engines, and the engines' state after a failed step."""

import asyncio
import pickle

import pytest

from sglang_topp.errors import BadRequestError, InvalidInputError, WeightPushError
from sglang_topp_client import AsyncRolloutClient, RolloutClient, WeightPusher
from tests.client.conftest import answers, by_request, cancel, sends_bytes, silent, until
from tests.client.weight_push.conftest import CONTINUE, FLUSH, INFO, PAUSE, TENSORS, refuse, steps

pytestmark = pytest.mark.usefixtures("no_leftovers")

UPDATE = "/update_weights_from_disk"


@pytest.fixture
def engines(start_engines):
    """Three servers."""
    return start_engines(UPDATE, PAUSE, CONTINUE, tp_sizes=(1, 1, 1), tensors={"a": [1]})


def client_of(engines, **options):
    return AsyncRolloutClient([engine.url for engine in engines], **options)


unavailable = answers({"error": "try again"}, 503)
unread = answers({"success": False, "message": "Failed to get weights iterator: no such folder."}, 400)
drop = sends_bytes(b"", ends=False)


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
async def test_a_partly_failed_push_names_each_version_and_leaves_all_paused(engines, client, fault):
    engines[1].script = [fault]
    with pytest.raises(WeightPushError) as failed:
        await client.push_weights("/weights/8", version="8")
    error = pickle.loads(pickle.dumps(failed.value))
    assert error.weight_versions == {engines[0].url: "8", engines[1].url: None, engines[2].url: "8"}
    for engine in engines:
        assert engine.url in str(error)
        assert CONTINUE not in steps(engine)
    await client.push_weights("/weights/8", version="8")
    assert [engine.of(CONTINUE) != [] for engine in engines] == [True] * 3


async def test_an_answer_without_success_is_a_failure(engines, client):
    engines[2].script = [answers({"message": "perhaps"})]
    with pytest.raises(WeightPushError, match="2 of 3 engines"):
        await client.push_weights("/weights/8", version="8")


@pytest.mark.parametrize(("path", "sent"), [(PAUSE, 0), (FLUSH, 0), (CONTINUE, 1)])
async def test_a_step_that_fails_on_one_engine_stops_all(engines, client, path, sent):
    engines[1].paths[path] = refuse
    expected = WeightPushError if sent else BadRequestError
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
async def test_a_step_that_may_be_repeated_is_repeated(engines, client, path, fault):
    accept = engines[1].paths[path]

    async def fail_once(asked, reply):
        engines[1].paths[path] = accept
        await fault(asked, reply)

    engines[1].paths[path] = fail_once
    await client.push_weights("/weights/8", version="8")
    assert [len(engine.calls) for engine in engines] == [1] * 3


async def test_a_cancellation_before_the_weights_are_sent_ends_the_pause(engines, client):
    engines[2].paths[FLUSH] = silent
    push = asyncio.create_task(client.push_weights("/weights/8", version="8"))
    await until(lambda: engines[2].of(FLUSH))
    await cancel(push)
    assert [len(engine.of(CONTINUE)) for engine in engines] == [1] * 3
    assert not any(engine.calls for engine in engines)


@pytest.mark.parametrize(
    ("num_unread", "info", "kind", "words"),
    [
        (3, {}, BadRequestError, "no such folder"),
        (1, {}, WeightPushError, "{}: old weights; .*no such folder"),
        # A draft model may have been loaded before.
        (3, {"speculative_algorithm": "EAGLE"}, WeightPushError, "{}: weights unknown"),
        # Whoever paused the engines before continues them.
        (3, {"sglang_topp": {"is_paused": True}}, BadRequestError, "no such folder"),
        (3, {"sglang_topp": {}}, BadRequestError, "no such folder"),
    ],
    ids=["none", "some", "none with a draft model", "all were paused", "some may have been paused"],
)
async def test_engines_continue_only_if_no_weights_were_loaded(
    engines, client, num_unread, info, kind, words
):
    for engine in engines[:num_unread]:
        engine.script, engine.paths["/server_info"] = [unread], answers(INFO | info)
    with pytest.raises(kind, match=words.format(engines[0].url)) as failed:
        await client.push_weights("/weights/8", version="8")
    continue_again = kind is BadRequestError and not info
    assert [bool(engine.of(CONTINUE)) for engine in engines] == [continue_again] * 3
    if kind is BadRequestError:
        paused = ", ".join(engine.url for engine in engines)
        rest = "all engines continue" if continue_again else f"these stay paused: {paused}"
        assert failed.value.__notes__ == [f"no weights were loaded; {rest}"]


async def test_an_engine_without_the_plugin_is_refused(engines, client):
    engines[1].paths["/server_info"] = answers({"model_path": "m", "tp_size": 1})
    with pytest.raises(InvalidInputError, match=f"{engines[1].url} runs SGLang without sglang-topp"):
        await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(PAUSE) for engine in engines)


async def test_a_cache_that_is_not_flushed_afterwards_is_an_error(engines, client):
    accept = engines[0].paths[FLUSH]
    engines[0].paths[FLUSH] = by_request(lambda _: refuse if engines[0].calls else accept)
    with pytest.raises(WeightPushError, match="not every cache was flushed"):
        await client.push_weights("/weights/8", version="8")
    assert not any(engine.of(CONTINUE) for engine in engines)


async def test_an_engine_that_is_slow_is_an_error(engines, client):
    engines[0].script = [silent]
    with pytest.raises(WeightPushError, match=r"no answer in 3 s"):
        await client.push_weights("/weights/8", version="8", timeout_s=3.0)


async def test_a_sidecar_among_the_engines_is_refused_before_any_is_paused(engines, sidecar):
    engine_urls = [engines[0].url, sidecar.url]
    async with AsyncRolloutClient(sidecar.url, engine_url=engine_urls) as client:
        with pytest.raises(InvalidInputError, match=f"engine_url: {sidecar.url}"):
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


async def test_one_client_pushes_once_at_a_time(engines, client):
    pushes = [client.push_weights("/weights/8", version=version) for version in ("8", "9")]
    outcomes = await asyncio.gather(*pushes, return_exceptions=True)
    assert outcomes[0] is None
    assert "already" in str(outcomes[1])
    assert not client._weights.pauses
    await client.push_weights("/weights/9", version="9")


class SavedModel:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def save_pretrained(self, folder):
        (self.folder / "where").write_text(folder)


async def test_a_model_is_saved_to_a_folder_that_goes_away(engines, client, tmp_path):
    await client.push_weights(SavedModel(folder=tmp_path), version="8")
    folder = (tmp_path / "where").read_text()
    assert {call["model_path"] for engine in engines for call in engine.calls} == {folder}
    assert not tmp_path.joinpath(folder).exists()


async def test_a_path_that_exists_here_becomes_absolute(engines, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
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
async def test_wrong_arguments_are_refused_before_anything_is_sent(engines, client, arguments, message):
    arguments = {"weights": "w", "version": "8", **arguments}
    with pytest.raises(InvalidInputError, match=message):
        await client.push_weights(arguments.pop("weights"), **arguments)
    assert not any(engine.asked for engine in engines)
