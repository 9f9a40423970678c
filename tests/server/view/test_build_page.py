"""The page's file: its content, its security policy, and hostile text in rollouts."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html import unescape

import msgspec
import numpy as np
import pytest

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import (
    RolloutWriter,
    ScoredRollout,
    load_rollouts,
    load_scored_rollouts,
    save_rollouts,
)
from sglang_topp_server.view import build_page
from sglang_topp_server.view.build_page import (
    MAX_LISTED,
    content_security_policy,
    detail_of,
    page_of_file,
    page_of_rollouts,
)
from sglang_topp_server.view.token_text import TokenTexts


def data_of(page):
    text = page.decode() if isinstance(page, bytes) else page
    return json.loads(re.search(r'id="overview">(.*?)</script>', text, re.DOTALL)[1])


def details_of(page):
    found = re.findall(r'id="detail-(\d+)">([^<]*)</script>', page.decode())
    return {int(row): decode(base64.b64decode(text)) for row, text in found}


def decode(packed):
    return json.loads(gzip.decompress(packed))


def test_the_detail_is_the_rollout(rollouts):
    for rollout in rollouts:
        detail = detail_of(ScoredRollout(rollout))
        sets = rollout.candidates
        assert detail["ids"] == rollout.output_ids.tolist()
        assert detail["sizes"] == sets.sizes.tolist()
        for listed, (token_ids, logprobs), sampled in zip(
            detail["candidates"], sets, rollout.output_ids, strict=True
        ):
            rank = token_ids.tolist().index(sampled) if len(token_ids) else 0
            kept = [*range(min(len(token_ids), MAX_LISTED)), *([rank] if rank >= MAX_LISTED else [])]
            assert [token_id for token_id, _ in listed] == token_ids[kept].tolist()
            expected = [None] * len(kept) if logprobs is None else pytest.approx(logprobs[kept], abs=1e-6)
            assert [logprob for _, logprob in listed] == expected


def test_all_rollouts_are_in_a_small_page(scored_file):
    scored = dict(load_scored_rollouts(scored_file))
    page = b"".join(page_of_file(scored_file))
    data = data_of(page)
    assert sorted(data["detailed"]) == list(range(24))
    assert set(details_of(page)) == set(range(24))
    assert data["title"] == "scored.parquet"
    for row, detail in details_of(page).items():
        assert detail == msgspec.json.decode(msgspec.json.encode(detail_of(scored[row])))


def test_those_of_the_worst_tokens_come_first(scored_file):
    data = data_of(b"".join(page_of_file(scored_file, max_detailed=3)))
    table = data["table"]

    def worst(name, badness):
        rows = [row for row in range(24) if table[name][row] is not None]
        return max(rows, key=lambda row: badness(table[name][row]))

    expected = [
        worst("largest", lambda size: size),
        worst("least", lambda mass: -mass),
        worst("worst_ratio", lambda ratio: abs(np.log(ratio))),
    ]
    assert data["detailed"][: len(set(expected))] == list(dict.fromkeys(expected))
    assert data["verdict"]["rollouts"] == 24


def test_a_page_has_an_end_in_bytes(scored_file, monkeypatch):
    monkeypatch.setattr(build_page, "_MAX_DETAIL_BYTES", 20_000)
    page = b"".join(page_of_file(scored_file))
    data = data_of(page)
    assert 0 < len(data["detailed"]) < data["wanted"] == 24
    assert set(details_of(page)) == set(data["detailed"])


def test_a_directory_and_memory_give_the_same_numbers(tmp_path, rollouts):
    with RolloutWriter(tmp_path / "run", part_size=7) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    saved = data_of(b"".join(page_of_file(tmp_path / "run")))
    held = data_of(b"".join(page_of_rollouts(list(load_rollouts(tmp_path / "run")), "run")))
    assert saved == held
    assert saved["verdict"]["rollouts"] == 24


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(scored_file):
    page = b"".join(page_of_file(scored_file)).decode()
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy == content_security_policy()
    assert policy.startswith("default-src 'none';")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
    ):
        assert word not in script


def test_text_of_rollouts_ends_no_element(tmp_path, rollouts, make):
    bad = "".join(make.hostile)
    hostile = replace(
        rollouts[0],
        text=bad,
        request_id=bad,
        finish_reason=bad,
        weight_spans=((bad, len(rollouts[0].output_ids)),),
    )
    path = tmp_path / "<script>.parquet"
    save_rollouts(path, [hostile])
    page = b"".join(page_of_file(path)).decode()
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 3
    assert "<!--" not in page
    assert "<img" not in page
    assert data_of(page)["verdict"]["reasons"] == [[bad, 1]]


def test_texts_of_tokens(tokenizer_file):
    texts = TokenTexts(tokenizer_file.parent)
    ids = dict.fromkeys(range(14))
    found = texts.texts_of(ids)
    assert found["0"] == "<script>window.hacked = 1</script>"
    assert [found[str(i)] for i in range(6, 14)] == [
        " ",
        "\n",
        "\t",
        [0xC3],
        [0xA9],
        "\n ",
        "\u200b",
        "\u202e",
    ]
    assert texts.text_of(14) == " word0"
    assert texts.text_of(10**6) is None


def test_a_sentencepiece_like_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"▁a": 0, "<0xC3>": 1, "b": 2}, "merges": [], "byte_fallback": True}
    added = [
        {
            "id": 3,
            "content": "▁<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    path.write_text(json.dumps({"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}))
    texts = TokenTexts(path)
    assert [texts.text_of(i) for i in range(4)] == [" a", [0xC3], "b", "▁<s>"]


def test_another_models_tokenizer_is_noticed(tmp_path, rollouts, tokenizer_file):
    save_rollouts(tmp_path / "one.parquet", rollouts[:2])
    data = data_of(b"".join(page_of_file(tmp_path / "one.parquet", tokenizer=TokenTexts(tokenizer_file))))
    assert data["num_other_texts"] == 2
    words = "".join(f" word{i - 14}" for i in rollouts[0].output_ids.tolist())
    save_rollouts(tmp_path / "right.parquet", [replace(rollouts[0], text=words)])
    if (rollouts[0].output_ids >= 14).all():
        data = data_of(
            b"".join(page_of_file(tmp_path / "right.parquet", tokenizer=TokenTexts(tokenizer_file)))
        )
        assert data["num_other_texts"] == 0


@pytest.mark.parametrize(
    ("name", "content"), [("none", None), ("tokenizer.json", "{}"), ("tokenizer.json", "[")]
)
def test_no_tokenizer_is_an_error(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInputError, match="--tokenizer: "):
        TokenTexts(tmp_path / name)


def test_no_rollouts_are_an_error(tmp_path):
    save_rollouts(tmp_path / "none.parquet", [])
    with pytest.raises(InvalidInputError, match=r"none\.parquet: got no rollouts"):
        page_of_file(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(WireError, match=r"text\.parquet"):
        page_of_file(tmp_path / "text.parquet")


def test_progress_is_told(scored_file):
    steps = []
    list(page_of_file(scored_file, step=lambda *told: steps.append(told)))
    assert [num_rollouts for num_rollouts, _ in steps] == list(range(1, 25))
