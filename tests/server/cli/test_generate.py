"""The command `sglang-topp generate`, before an engine that injects faults."""

import json
import os
import signal
import subprocess
import sys

import pytest

from examples.tiny_model import make_tiny_model
from sglang_topp_client import load_rollouts
from sglang_topp_server.cli import main

COMMAND = [sys.executable, "-m", "sglang_topp_server.cli.main", "generate"]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    for name in ("SGLANG_TOPP_API_KEY", "SGLANG_TOPP_ENGINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["sidecar", "engine"])
def url(request):
    """A sidecar before the engine, and the engine itself."""
    return request.getfixturevalue(request.param).url


def restore_interrupts():
    """Undo what a shell does to jobs in the background: they ignore interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def generate(*arguments):
    return main.main(["generate", *arguments])


def test_a_table_shows_the_candidates_of_each_token(url, capsys):
    assert generate("--url", url, "--prompt", "ab", "--top-logprobs-p", "0.9") == 0
    heading, text, columns, *rows = capsys.readouterr().out.splitlines()
    assert heading == (
        "prompt 0, sample 0: 3 tokens, finish reason length, weights '7', mean kept mass 1.0000,"
        " candidates per token: mean 4.0, largest 4"
    )
    assert text == "'xxx'"
    assert columns.split() == ["position", "token", "probability", "kept", "mass", "candidates"]
    assert [row.split() for row in rows] == [
        f"{t} {10 + t} 0.4000 1.0000 {10 + t} 0.400 100 0.300 101 0.200 102 0.100".split() for t in range(3)
    ]


def test_more_candidates_than_fit_are_counted(url, capsys):
    params = json.dumps({"set_size": 1009})
    assert (
        generate("--url", url, "--prompt", "ab", "--top-logprobs-p", "0.9", "--sampling-params", params) == 0
    )
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split()[-3:] for row in rows] == [["…", "1,003", "more"]] * 3


def test_without_sets_a_table_shows_the_tokens(url, capsys):
    assert generate("--url", url, "--prompt", "ab", "--top-logprobs-p", "0") == 0
    *_, columns, first, _, _ = capsys.readouterr().out.splitlines()
    assert columns.split() == ["position", "token", "probability"]
    assert first.split() == ["0", "10", "0.4000"]


def test_prompts_and_samples_come_in_order(url, capsys):
    assert generate("--url", url, "--prompt", "a", "--prompt", "b", "--n", "2") == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prompt")]
    assert [heading.partition(":")[0] for heading in headings] == [
        f"prompt {prompt}, sample {sample}" for prompt in (0, 1) for sample in (0, 1)
    ]


def test_only_given_options_are_sent(engine, capsys):
    arguments = ["--temperature", "0.5", "--top-p", "0.8", "--top-k", "7", "--min-p", "0.1"]
    arguments += ["--max-new-tokens", "9", "--sampling-params", '{"seed": 1}']
    assert generate("--url", engine.url, "--prompt", "ab", "--top-logprobs-p", "0.9", *arguments) == 0
    assert generate("--url", engine.url, "--prompt", "ab") == 0
    first, second = engine.bodies
    assert (first["text"], first["top_logprobs_p"]) == ("ab", 0.9)
    assert (
        first["sampling_params"]
        == {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "max_new_tokens": 9, "seed": 1}
        | second["sampling_params"]
    )
    assert second["sampling_params"].keys() == {"n", "stream_interval"}


def test_the_candidates_are_by_default_what_the_sampler_could_draw(engine, capsys):
    assert generate("--url", engine.url, "--prompt", "ab", "--top-p", "0.8") == 0
    assert capsys.readouterr().out.splitlines()[2].split()[-1] == "candidates"
    (body,) = engine.bodies
    assert body["top_logprobs_source"] == "sampler"
    assert "top_logprobs_p" not in body


def test_several_servers_share_the_prompts(engine, sidecar, serve_engine, capsys):
    with serve_engine() as other:
        arguments = [part for i in range(8) for part in ("--prompt", f"p{i}")]
        assert generate("--url", engine.url, "--url", other.url, *arguments) == 0
        assert len(engine.bodies) + len(other.bodies) == 8
        assert engine.bodies
        assert other.bodies


def test_rollouts_are_saved(url, capsys, tmp_path):
    out = tmp_path / "run"
    assert generate("--url", url, "--prompt", "a", "--n", "3", "--out", str(out)) == 0
    assert capsys.readouterr().out == f"{out}: 3 rollouts, 9 tokens\n"
    rollouts = list(load_rollouts(out))
    assert sorted(rollout.sample_index for rollout in rollouts) == [0, 1, 2]
    assert [rollout.candidates.sizes.tolist() for rollout in rollouts] == [[4, 4, 4]] * 3
    assert main.main(["view", str(out), "-o", str(tmp_path / "run.html")]) == 0


@pytest.mark.parametrize("path", ["file", "file/run", "run"])
def test_a_wrong_path_costs_no_samples(engine, capsys, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "part-000000-00000000.parquet").touch()
    assert generate("--url", engine.url, "--prompt", "a", "--out", path) == 1
    assert path.partition("/")[0] in capsys.readouterr().err
    assert engine.bodies == []


def test_rollouts_before_a_failure_are_kept(engine, capsys, tmp_path, monkeypatch):
    """The disk is full after the first part."""
    monkeypatch.setattr("sglang_topp_server.cli.generate._PART_SIZE", 2)
    synced, sync = [], os.fsync

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > 3:  # the directory, the first part, and the directory again
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert generate("--url", engine.url, "--prompt", "a", "--n", "5", "--out", str(tmp_path / "run")) == 1
    monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().err
    assert len(list(load_rollouts(tmp_path / "run"))) == 2


def test_the_key_comes_from_the_environment(engine, start, monkeypatch, capsys):
    sidecar = start(engine.url, api_key="secret")
    assert generate("--url", sidecar.url, "--prompt", "a") == 1
    assert "HTTP 401" in capsys.readouterr().err
    monkeypatch.setenv("SGLANG_TOPP_API_KEY", "secret")
    assert generate("--url", sidecar.url, "--prompt", "a") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-logprobs-p", "2"], "top_logprobs_p"),
        (["--sampling-params", '{"fault": "refuse"}'], "the engine's own words: top_k must be positive"),
        (["--sampling-params", '{"fault": "no-sets"}', "--top-logprobs-p", "0.9"], "holds no candidate sets"),
        (["--sampling-params", '{"top_p": 1}', "--top-p", "0.9"], "got top_p, which --top-p sets too"),
    ],
)
def test_failures_are_one_sentence_and_exit_with_1(engine, capsys, arguments, message):
    assert generate("--url", engine.url, "--prompt", "a", *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("sglang-topp: error: ")
    assert message in line


def test_no_server_is_an_error(capsys):
    assert generate("--url", "http://127.0.0.1:1", "--prompt", "a") == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "a", "--sampling-params", "[]"],
        ["--prompt", "a", "--sampling-params", "{"],
        ["--prompt", "a", "--max-new-tokens", "0"],
    ],
)
def test_wrong_arguments_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        generate(*arguments)
    assert raised.value.code == 2
    assert "usage: sglang-topp generate" in capsys.readouterr().err


def test_a_missing_extra_is_named_before_anything_is_sent(engine):
    argv = ["generate", "--url", engine.url, "--prompt", "a", "--out", "x"]
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"from sglang_topp_server.cli.main import main; sys.exit(main({argv!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'sglang-topp[data]'" in done.stderr
    assert engine.bodies == []


# -- texts of tokens -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_texts_of_tokens_are_shown_as_literals(engine, model, capsys):
    """The ids 100 to 102 are bytes that are not UTF-8 alone."""
    assert (
        generate("--url", engine.url, "--prompt", "a", "--top-logprobs-p", "0.9", "--tokenizer", str(model))
        == 0
    )
    captured = capsys.readouterr()
    tokens = [line.split()[1] for line in captured.out.splitlines()[3:]]
    assert tokens == ["'*'", "'+'", "','"]
    assert captured.err == ""
    assert "b'\\x" in captured.out


def test_the_tokenizer_of_the_servers_model_is_found(engine, model, capsys, monkeypatch):
    monkeypatch.setattr(engine, "model_path", str(model))
    assert generate("--url", engine.url, "--prompt", "a") == 0
    # The engine's text is "xxx", and this tokenizer says "*+,": it is another one's.
    captured = capsys.readouterr()
    assert [line.split()[1] for line in captured.out.splitlines()[3:]] == ["10", "11", "12"]
    assert "--tokenizer" in captured.err
    monkeypatch.setattr(engine, "text", "*+,")
    assert generate("--url", engine.url, "--prompt", "a") == 0
    captured = capsys.readouterr()
    assert [line.split()[1] for line in captured.out.splitlines()[3:]] == ["'*'", "'+'", "','"]
    assert captured.err == ""


def test_a_models_text_cannot_control_the_terminal(engine, capsys, monkeypatch):
    monkeypatch.setattr(engine, "text", "\x1b[2J\x9b\u202e\n[red]")
    assert generate("--url", engine.url, "--prompt", "a") == 0
    assert capsys.readouterr().out.splitlines()[1] == r"'\x1b[2J\x9b\u202e\n[red]'"


# -- pipes and signals -------------------------------------------------------------------


def test_a_reader_that_stops_gets_no_complaint(engine):
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*COMMAND, "--url", engine.url, "--prompt", "a"], stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Broken" not in errors


def test_an_interrupt_aborts_the_request_and_exits_with_130(engine, eventually):
    arguments = ["--url", engine.url, "--prompt", "a", "--sampling-params", '{"fault": "hang"}']
    with subprocess.Popen(
        [*COMMAND, *arguments], stderr=subprocess.PIPE, preexec_fn=restore_interrupts
    ) as process:
        eventually(lambda: engine.running)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert errors == b""
    assert eventually(lambda: engine.aborted) == [engine.bodies[0]["rid"]]
