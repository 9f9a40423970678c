"""The wheel works in fresh environments, one for each way to install it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sglang_topp_server.process.launch import check_free
from tests.packaging.environments import NAME, ROOT, UV, make_environment, run

FAKE_ENGINE = ROOT / "tests" / "server" / "fake_engine" / "sglang" / "launch_server.py"
START_LIMIT_S = 120


def packages_of(folder: Path) -> dict[str, str]:
    listing = run(UV, "pip", "list", "--format", "json", "--python", folder)
    return {package["name"]: package["version"] for package in json.loads(listing.stdout)}


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.terminate()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    with httpx.Client(trust_env=False, timeout=60) as client:
        while client.get(f"{url}/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_bare_client_asks_a_sidecar_of_the_server_extra(wheel: Path, tmp_path: Path) -> None:
    client = make_environment(tmp_path / "client", f"{NAME} @ {wheel.as_uri()}")
    server = make_environment(tmp_path / "server", f"{NAME}[server] @ {wheel.as_uri()}")
    assert "torch" not in packages_of(tmp_path / "server")
    program = """
import sys
from sglang_topp_client import RolloutClient
with RolloutClient(sys.argv[1]) as client:
    (rollout,) = client.generate("ab", {"max_new_tokens": 3}, top_logprobs_p=0.9)
print(rollout.candidates.sizes.tolist(), rollout.output_ids.tolist())
"""
    port = check_free("127.0.0.1", 0)
    engine = f"http://127.0.0.1:{port}"
    with (
        running(server / "python", FAKE_ENGINE, "--host", "127.0.0.1", "--port", str(port)),
        running(server / NAME, "sidecar", "--engine-url", engine, "--port", "0") as sidecar,
    ):
        assert sidecar.stdout is not None
        url = sidecar.stdout.readline().split()[3]
        wait_until_ready(url)
        assert run(client / "python", "-c", program, url).stdout == "[4, 4, 4] [10, 11, 12]\n"
        table = run(client / NAME, "generate", "--url", url, "--prompt", "ab").stdout.splitlines()[3:]
        assert [row.split()[1] for row in table] == ["10", "11", "12"]


def test_the_torch_extra_extracts_and_replays(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "torch", f"{NAME}[torch] @ {wheel.as_uri()}") / "python"
    assert not packages_of(tmp_path / "torch").keys() & {"sglang", "fastapi", "transformers"}
    program = """
import torch
from sglang_topp import CandidateSets
from sglang_topp.nucleus import top_p_candidates
from sglang_topp.replay import score_logits

logits = torch.tensor([[4.0, 3.0, 2.0, -9.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
logprobs = torch.log_softmax(logits.detach(), -1)
sampled = torch.tensor([0, 3])
token_ids, kept, offsets = top_p_candidates(logprobs, 0.9, sampled)
sets = CandidateSets(token_ids.numpy(), kept.numpy(), offsets.numpy(), sampled.numpy())
scores = score_logits(logits, sampled, sets).logprobs
assert torch.allclose(scores.detach(), torch.from_numpy(sets.masked_logprobs))
scores.sum().backward()
assert logits.grad.isfinite().all()
print(sets.sizes.tolist())
"""
    assert run(python, "-c", program).stdout == "[2, 4]\n"


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The size and the time of each file, but for those of our distribution."""
    files = {}
    for parent, _, names in os.walk(folder):
        if "/sglang_topp" in parent:
            continue
        for name in names:
            path = Path(parent, name)
            information = path.lstat()
            files[str(path)] = (information.st_size, information.st_mtime_ns)
    return files


def test_an_environment_with_sglang_stays_as_it_was_and_serves_sets(wheel: Path, tmp_path: Path) -> None:
    executables = make_environment(tmp_path / "sglang", "sglang")
    folder = tmp_path / "sglang"
    packages, files = packages_of(folder), state_of(folder)
    assert "sglang/srt" in "".join(files)
    run(UV, "pip", "install", "--python", folder, f"{NAME}[sglang,server] @ {wheel.as_uri()}")
    changed = packages_of(folder)
    assert changed.pop(NAME)
    assert changed == packages
    after = state_of(folder)
    assert after.pop(str(executables / NAME))
    assert after == files

    # SGLang loads the plugin itself, and `doctor` reports what it patched.
    env = {**os.environ, "SGLANG_PLATFORM": "sglang_topp_cpu"}
    report = run(executables / NAME, "doctor", env=env).stdout.splitlines()
    assert report[-1] == "the plugin holds"
