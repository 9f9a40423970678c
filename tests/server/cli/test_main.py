"""The command line of `sglang-topp`: options, refused values, and exit statuses."""

import subprocess
import sys
import types
from importlib.metadata import entry_points

import pytest

from sglang_topp.errors import PatchError
from sglang_topp_server.cli import main
from sglang_topp_server.process import launch
from sglang_topp_server.settings import Limits, Settings


@pytest.fixture
def runs(monkeypatch):
    """Return the arguments of `launch.run`, which does not run."""
    calls = []

    async def run(settings, command=None):
        calls.append((settings, command))

    monkeypatch.setattr(launch, "run", run)
    for name in ("SGLANG_TOPP_API_KEY", "SGLANG_TOPP_ENGINE_API_KEY", "SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    return calls


def without(*modules, argv):
    """Run the command in a process that cannot import these modules."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
        f"from sglang_topp_server.cli.main import main; sys.exit(main({argv!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_command_is_installed():
    (entry,) = entry_points(group="console_scripts", name="sglang-topp")
    assert entry.load() is main.main


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["sidecar", "--help"], ["--version"]])
def test_help_needs_no_extra(argv):
    done = without("torch", "sglang", "fastapi", "uvicorn", "pydantic", "prometheus_client", argv=argv)
    assert done.returncode == 0, done.stderr
    assert "sglang-topp" in done.stdout


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "pydantic", "prometheus_client"])
def test_a_missing_server_extra_is_named(module):
    done = without(module, argv=["sidecar", "--engine-url", "http://127.0.0.1:1"])
    assert done.returncode == 2
    assert f"{module} is not installed" in done.stderr
    assert "pip install 'sglang-topp[server]'" in done.stderr


@pytest.mark.parametrize("argv", [["serve", "--model-path", "m"], ["doctor"]])
def test_a_missing_sglang_is_named(argv):
    done = without("sglang", argv=argv)
    assert done.returncode == 2
    assert "SGLang is not installed" in done.stderr
    assert "sglang]'" in done.stderr


def test_serve_passes_all_options_to_launch(runs, monkeypatch):
    monkeypatch.setenv("SGLANG_TOPP_API_KEY", "ours")
    monkeypatch.setenv("SGLANG_TOPP_ENGINE_API_KEY", "theirs")
    argv = ["serve", "--model-path", "m", "--host", "0.0.0.0", "--port", "9", "--engine-port", "0"]
    argv += ["--max-in-flight", "3", "--max-samples", "4", "--max-body-bytes", "5"]
    argv += ["--io-timeout-s", "9", "--max-held-bytes", "10"]
    argv += ["--ready-timeout-s", "7", "--grace-s", "8", "--", "--tp-size", "2", "--", "--x"]

    assert main.main(argv) == 0

    ((settings, command),) = runs
    assert (settings.host, settings.port) == ("0.0.0.0", 9)
    assert (settings.api_key, settings.engine_api_key) == ("ours", "theirs")
    assert settings.limits == Limits(3, 4, 5, 9.0, 10)
    assert (settings.ready_timeout_s, settings.grace_s) == (7.0, 8.0)
    port = settings.engine_url.removeprefix("http://127.0.0.1:")
    assert int(port) > 0
    assert command == launch.engine_command("m", "127.0.0.1", int(port), ["--tp-size", "2", "--", "--x"])


@pytest.mark.parametrize("given", [[], ["--view", "0"]])
def test_the_defaults_are_those_of_limits(runs, given):
    assert main.main(["sidecar", "--engine-url", "http://e:1", *given]) == 0

    ((settings, command),) = runs
    assert settings == Settings("http://e:1")
    assert command is None


@pytest.mark.parametrize("given", [["--port", "1"], ["--host=::"], ["--model-path", "x"], ["--api-key", "k"]])
def test_what_serve_sets_itself_is_refused_after_the_dashes(runs, capsys, given):
    assert main.main(["serve", "--model-path", "m", "--engine-port", "0", "--", *given]) == 2
    assert given[0].partition("=")[0] in capsys.readouterr().err
    assert runs == []


@pytest.mark.parametrize(
    ("allowed", "status"), [("other", 2), ("other, sglang_topp", 0), ("sglang_topp", 0), ("", 0)]
)
def test_a_plugin_list_without_ours_is_refused(runs, monkeypatch, capsys, allowed, status):
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    assert main.main(["serve", "--model-path", "m", "--engine-port", "0"]) == status
    assert ("SGLANG_PLUGINS" in capsys.readouterr().err) == bool(status)
    assert len(runs) == (status == 0)


@pytest.mark.parametrize(("platform", "status"), [("vendor", 2), ("sglang_topp_cpu", 0), ("", 0)])
def test_a_platform_that_leaves_ours_out_is_refused(runs, monkeypatch, capsys, platform, status):
    monkeypatch.setenv("SGLANG_PLATFORM", platform)
    assert main.main(["serve", "--model-path", "m", "--engine-port", "0"]) == status
    assert ("SGLANG_PLATFORM: got 'vendor'" in capsys.readouterr().err) == bool(status)
    assert len(runs) == (status == 0)


@pytest.mark.parametrize("name", ["SGLANG_TOPP_API_KEY", "SGLANG_TOPP_ENGINE_API_KEY"])
def test_an_empty_key_is_an_error_not_an_open_door(runs, monkeypatch, capsys, name):
    monkeypatch.setenv(name, " ")
    assert main.main(["sidecar", "--engine-url", "http://e:1"]) == 1
    assert f"{name} is set but empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SGLANG_TOPP_API_KEY", "SGLANG_TOPP_ENGINE_API_KEY"])
def test_a_key_that_no_header_can_carry_is_refused(runs, monkeypatch, capsys, name):
    monkeypatch.setenv(name, "a secret from a file\n")
    assert main.main(["sidecar", "--engine-url", "http://e:1"]) == 1
    assert name in capsys.readouterr().err
    assert not runs


@pytest.mark.parametrize("workers", [["--tokenizer-worker-num", "2"], ["--tokenizer-worker-num=4"]])
def test_a_key_with_several_http_workers_is_refused(runs, monkeypatch, capsys, workers):
    argv = ["serve", "--model-path", "m", "--engine-port", "0", "--", "--tp-size", "2", *workers]
    assert main.main(argv) == 0
    monkeypatch.setenv("SGLANG_TOPP_ENGINE_API_KEY", "theirs")
    assert main.main(argv) == 2
    assert "several HTTP workers" in capsys.readouterr().err
    assert len(runs) == 1


def test_one_port_for_both_is_refused(runs, capsys):
    port = str(launch.check_free("127.0.0.1", 0))
    assert main.main(["serve", "--model-path", "m", "--port", port, "--engine-port", port]) == 2
    assert "--engine-port" in capsys.readouterr().err
    assert runs == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["serve"],
        ["sidecar"],
        ["doctor", "--", "--tp-size", "2"],
        ["sidecar", "--engine-url", "http://e:1", "--port", "65536"],
        ["sidecar", "--engine-url", "http://e:1", "--max-in-flight", "0"],
        ["sidecar", "--engine-url", "http://e:1", "--io-timeout-s", "inf"],
        ["sidecar", "--engine-url", "http://e:1", "--grace-s", "-1"],
        ["sidecar", "--engine-url", "http://e:1", "--view", "-1"],
        ["sidecar", "--engine-url", "http://e:1", "--workers", "2"],
    ],
)
def test_wrong_arguments_exit_with_2(runs, capsys, argv):
    with pytest.raises(SystemExit) as raised:
        main.main(argv)
    assert raised.value.code == 2
    assert "usage: sglang-topp" in capsys.readouterr().err
    assert runs == []


@pytest.mark.parametrize(
    ("argv", "is_hinted"),
    [
        (["serve", "--model-path", "m", "--tp-size", "2"], True),
        (["serve", "--tp-size=2", "--model-path", "m", "--", "--dtype", "float32"], True),
        (["sidecar", "--engine-url", "http://e:1", "--tp-size", "2"], False),
        (["doctor", "--tp-size", "2"], False),
    ],
)
def test_options_of_sglang_belong_after_the_dashes(runs, capsys, argv, is_hinted):
    with pytest.raises(SystemExit) as raised:
        main.main(argv)
    assert raised.value.code == 2
    assert "unrecognized arguments: --tp-size" in (errors := capsys.readouterr().err)
    assert ("put SGLang's own arguments after --" in errors) == is_hinted
    assert runs == []


@pytest.mark.parametrize("path", ["/none/model", "./none", "../none", "~/none", "here", "name/on-the-hub"])
def test_a_model_path_that_is_not_there_is_refused_at_once(runs, capsys, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    is_path = path[0] in "/.~"
    status = main.main(["serve", "--model-path", path, "--engine-port", "0"])
    assert (status, len(runs)) == ((2, 0) if is_path else (0, 1))
    assert (f"--model-path: {path} does not exist" in capsys.readouterr().err) == is_path
    if path.startswith("."):
        (tmp_path / path).mkdir()
        assert main.main(["serve", "--model-path", path, "--engine-port", "0"]) == 0


def test_a_wrong_engine_url_is_refused(capsys):
    argv = ["sidecar", "--engine-url", "localhost:30000", "--port", "0"]
    assert main.main(argv) == 1
    assert "expected http://host:port" in capsys.readouterr().err


def test_a_failure_is_one_sentence_and_exits_with_1(runs, monkeypatch, capsys):
    async def run(settings, command=None):
        raise PatchError("Sampler.forward is gone")

    monkeypatch.setattr(launch, "run", run)
    assert main.main(["serve", "--model-path", "m", "--engine-port", "0"]) == 1
    assert capsys.readouterr().err == "sglang-topp: error: Sampler.forward is gone\n"


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_doctor_prints_the_report(monkeypatch, capsys, holds, status):
    doctor = types.ModuleType("sglang_topp_patches.plugin")
    doctor.report = lambda verbose: (holds, ["seam one", "seam two"][: 1 + verbose])
    monkeypatch.setitem(sys.modules, "sglang_topp_patches.plugin", doctor)

    assert main.main(["doctor"]) == status
    assert capsys.readouterr().out == "seam one\n"
    assert main.main(["doctor", "-v"]) == status
    assert capsys.readouterr().out == "seam one\nseam two\n"


def test_doctor_checks_a_sidecar(sidecar, capsys):
    assert main.main(["doctor", "--url", sidecar.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{sidecar.url}: SGLang 0.5.23, model fake-model",
        "its plugin is active, and no field is lost on the way",
    ]


def test_doctor_names_what_a_sidecar_lacks(engine, start, capsys):
    engine.patch = {"active": False, "problems": ["Sampler.forward is gone"]}
    sidecar = start(engine.url, wait=False)
    assert main.main(["doctor", "--url", sidecar.url]) == 1
    assert "Sampler.forward is gone" in capsys.readouterr().err


def test_doctor_names_a_server_that_is_not_there(capsys):
    assert main.main(["doctor", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().err


def test_an_engine_at_no_address_is_refused_at_the_start(capsys):
    assert main.main(["sidecar", "--engine-url", "http://x:99999", "--port", "0"]) == 1
    assert "base_url: got 'http://x:99999': Port out of range" in capsys.readouterr().err
