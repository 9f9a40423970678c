"""The files in `deploy/` name the present version and commands that exist. They are linted by `make lint`."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_topp_patches.releases import RELEASES
from sglang_topp_server.cli import main
from sglang_topp_server.process import launch

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that the command would have served with."""
    served: list[Any] = []

    async def run(settings: Any, command: Any = None) -> None:
        served.append(settings)

    monkeypatch.setattr(launch, "run", run)
    for name in ("SGLANG_TOPP_API_KEY", "SGLANG_TOPP_ENGINE_API_KEY", "SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    return served


def test_the_image_is_of_the_newest_release_and_the_present_version() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    newest = next(iter(RELEASES))
    assert re.findall(r"^FROM (\S+)", dockerfile, re.M) == [f"lmsysorg/sglang:v{newest}"]
    ours = version("sglang-topp")
    assert f"-t sglang-topp:{ours} " in dockerfile
    assert {COMPOSE["services"][name]["image"] for name in ("engine", "sidecar")} == {f"sglang-topp:{ours}"}
    values = yaml.safe_load((DEPLOY / "smg-values.yaml").read_text())
    assert {worker["image"]["tag"] for worker in values["workers"]} == {ours}


def test_the_sidecar_of_the_compose_file_starts(settings: list[Any]) -> None:
    assert main.main(COMPOSE["services"]["sidecar"]["command"]) == 0
    assert settings[0].host == "0.0.0.0"
    assert settings[0].engine_url == "http://engine:30000"
    targets = [
        target
        for job in yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
        for one in job["static_configs"]
        for target in one["targets"]
    ]
    assert targets == [f"sidecar:{settings[0].port}", "engine:30000"]


def test_ports_are_published_on_this_machine_only() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name


def test_configurations_of_the_compose_file_are_yaml_and_are_used() -> None:
    used = {one["source"] for service in COMPOSE["services"].values() for one in service.get("configs", [])}
    assert used == set(COMPOSE["configs"])
    for one in COMPOSE["configs"].values():
        if "file" in one:
            assert (DEPLOY / one["file"]).is_file()
        else:
            assert isinstance(yaml.safe_load(one["content"]), dict)


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_a_unit_starts_the_command(settings: list[Any], unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
    values = {"${MODEL_PATH}": "model", "$SGLANG_ARGUMENTS": "", "${ENGINE_URL}": "http://engine:30000"}
    program, *arguments = (values.get(word, word) for word in shlex.split(line))
    assert Path(program).name == "sglang-topp"
    split = arguments.index("--") if "--" in arguments else len(arguments)
    port = ["--engine-port", "0"] if arguments[0] == "serve" else []
    assert main.main([*arguments[:split], *port]) == 0
    grace_s = settings[0].grace_s
    (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.M)
    # The requests, then the engine, and then the time to kill it.
    assert int(limit_s) > (2 * grace_s + 30 if arguments[0] == "serve" else grace_s)
