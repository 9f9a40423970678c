"""One served engine for all blocks of the documentation that need one: the tutorial's commands start it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documentation_blocks import DOCS
from tests.engine.start_servers import with_forks


class Served(NamedTuple):
    """A running `sglang-topp serve`, and the model that it serves."""

    sidecar: str
    engine: str
    model: Path


def tutorial_command(start: str) -> list[str]:
    """Return the words of the tutorial's only command that begins with `start`."""
    page = (DOCS / "tutorial.md").read_text().replace("\\\n", "")
    (line,) = re.findall(rf"^{re.escape(start)}.*$", page, re.M)
    return shlex.split(line)


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Make the tutorial's model, and serve it on free ports."""
    folder = tmp_path_factory.mktemp("docs")
    _, script, *arguments = tutorial_command("python examples/")
    subprocess.run([sys.executable, DOCS.parent / script, *arguments], cwd=folder, check=True)

    variable, program, command, *arguments = tutorial_command("SGLANG_PLATFORM=")
    assert (program, command) == ("sglang-topp", "serve")
    name, _, value = variable.partition("=")
    module = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve"]
    with (folder / "server.log").open("w+") as log:
        process = subprocess.Popen(
            [*module, "--port", "0", "--engine-port", "0", *arguments, "--sleep-on-idle"],
            cwd=folder,
            env=with_forks(os.environ | {name: value}),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if "sidecar" not in words:
                log.seek(0)
                pytest.fail(f"the server did not start: {log.read()[-4000:]}")
            sidecar, engine = (words[words.index(which) + 1] for which in ("sidecar", "engine"))
            yield Served(sidecar, engine, folder / "tiny-model")
        finally:
            process.terminate()
            process.communicate()
