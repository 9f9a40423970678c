"""`GET /view`: the page of the last rollouts, off by default, behind the key."""

import json
import re

import httpx
import numpy as np

from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import from_record
from sglang_topp_server import limits
from sglang_topp_server.view.build_page import content_security_policy


def data_of(page):
    return json.loads(re.search(r'id="overview">(.*?)</script>', page, re.DOTALL)[1])


def test_it_is_off_by_default(sidecar):
    sidecar.rollouts("ab")
    assert sidecar.http.get("/view").status_code == 404


def test_it_shows_the_last_rollouts(engine, start):
    sidecar = start(engine.url, view=3)
    before = sidecar.http.get("/view")
    assert (before.status_code, before.json()["error"]["message"]) == (
        404,
        "GET /view: no rollout was served yet",
    )
    sidecar.rollouts(["a", "b"])
    sidecar.rollouts([[7, 8], [9]], stream=True)
    sidecar.scores([[1, 2, 3]])
    page = sidecar.http.get("/view")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == content_security_policy()
    assert page.headers["cache-control"] == "no-store"
    data = data_of(page.text)
    assert data["runs"][0]["name"] == "the last 3 rollouts"
    assert data["runs"][0]["verdict"]["rollouts"] == 3
    assert data["runs"][0]["verdict"]["missing"] == 0
    assert np.sum(data["table"]["tokens"]) == data["runs"][0]["verdict"]["tokens"] == 9


def test_it_needs_the_key(engine, start):
    sidecar = start(engine.url, view=2, api_key="open")
    assert sidecar.http.get("/view").status_code == 401
    headers = {"Authorization": "Bearer open"}
    body = {"prompts": "ab", "sampling_params": {}, "top_logprobs_p": 0.9}
    assert httpx.post(f"{sidecar.url}/rollouts", json=body, headers=headers, timeout=60).status_code == 200
    assert sidecar.http.get("/view", headers=headers).status_code == 200


def test_its_memory_is_bounded(monkeypatch, sidecar):
    (record,) = sidecar.rollouts("ab").json()["rollouts"]
    rollout = from_record(Rollout, record)
    monkeypatch.setattr(limits, "_MAX_RECENT_BYTES", 3 * limits.num_bytes_of(rollout))
    recent = limits.RecentRollouts(100)
    for _ in range(10):
        recent.add(rollout)
    assert len(recent) == 3
