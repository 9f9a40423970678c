"""The page's file: its content, its security policy, and hostile text in rollouts."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html import unescape

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import (
    RolloutWriter,
    ScoredRollout,
    load_rollouts,
    load_scored_rollouts,
    save_rollouts,
)
from sglang_topp_server.view.build_page import (
    content_security_policy,
    detail_of,
    page_of_files,
    page_of_rollouts,
)
from sglang_topp_server.view.run_summary import MAX_LISTED
from sglang_topp_server.view.token_text import TokenTexts


def data_of(page):
    text = page.decode() if isinstance(page, bytes) else page
    return json.loads(re.search(r'id="overview">(.*?)</script>', text, re.DOTALL)[1])


def details_of(page):
    found = re.findall(r'id="detail-(\d+)">([^<]*)</script>', page.decode())
    return {int(row): decode(base64.b64decode(text)) for row, text in found}


def page_of(*paths, **options):
    return b"".join(page_of_files(paths, **options))


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
    page = page_of(scored_file)
    assert set(details_of(page)) == set(range(24))
    assert data_of(page)["runs"][0]["name"] == "scored.parquet"
    for row, detail in details_of(page).items():
        assert detail == msgspec.json.decode(msgspec.json.encode(detail_of(scored[row])))


@pytest.mark.parametrize("num_bytes", [20_000, 40_000, 60_000])
def test_the_page_holds_the_worst_rollouts_up_to_a_size(scored_file, num_bytes):
    sizes = [len(text) for text in re.findall(r'id="detail-\d+">([^<]*)', page_of(scored_file).decode())]
    page = page_of(scored_file, megabytes=num_bytes / 1e6)
    shown = details_of(page)
    assert (
        num_bytes - max(sizes)
        < sum(len(text) for text in re.findall(r'id="detail-\d+">([^<]*)', page.decode()))
        <= num_bytes
    )
    table = data_of(page)["table"]
    largest = max(
        (row for row in range(24) if table["largest"][row] is not None), key=lambda row: table["largest"][row]
    )
    assert largest in shown


def test_runs_share_a_page(tmp_path, scored_file, rollouts):
    """The rows of the second run follow those of the first one, and have their own prompts and details."""
    other = tmp_path / "other" / scored_file.name
    other.parent.mkdir()
    save_rollouts(other, rollouts[5:9])
    page = page_of(scored_file, other)
    data, alone = data_of(page), data_of(page_of(other))
    assert [run["name"] for run in data["runs"]] == [str(scored_file), str(other)]
    assert data["runs"][1] == {**alone["runs"][0], "name": str(other)}
    assert data["table"]["run"] == [str(scored_file)] * 24 + [str(other)] * 4
    assert data["table"]["text"][24:] == alone["table"]["text"]
    prompts = [data["prompts"][prompt] for prompt in data["table"]["prompt"]]
    assert prompts == [" ".join(map(str, one.prompt_ids)) for one in [*rollouts, *rollouts[5:9]]]
    assert set(details_of(page)) == set(range(28))
    assert details_of(page)[24]["text"] == rollouts[5].text


def test_columns_of_a_trainer_are_in_the_table(tmp_path, scored_file):
    table = pq.read_table(scored_file)
    columns = {
        "kl": [None, float("nan"), *(1e-9 * i for i in range(22))],
        "kl_at": range(24),
        "tokens": [0] * 24,
    }
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    table = table.append_column("note", pa.array(["x"] * 24))
    pq.write_table(table, tmp_path / "more.parquet", row_group_size=7)
    shown, before = (data_of(page_of(path))["table"] for path in (tmp_path / "more.parquet", scored_file))
    assert shown["kl"] == [None, None, *(pytest.approx(1e-9 * i) for i in range(22))]
    assert shown["kl_at"] == list(range(24))
    assert {name: shown[name] for name in before} == before | {"run": ["more.parquet"] * 24}
    assert "note" not in shown


def test_a_directory_and_memory_give_the_same_numbers(tmp_path, rollouts):
    with RolloutWriter(tmp_path / "run", part_size=7) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    saved = data_of(page_of(tmp_path / "run"))
    held = data_of(b"".join(page_of_rollouts(list(load_rollouts(tmp_path / "run")), "run")))
    assert saved == held
    assert saved["runs"][0]["verdict"]["rollouts"] == 24


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(scored_file):
    page = page_of(scored_file).decode()
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
    page = page_of(path).decode()
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 3
    assert "<!--" not in page
    assert "<img" not in page
    assert data_of(page)["runs"][0]["verdict"]["reasons"] == [[bad, 1]]


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
    data = data_of(page_of(tmp_path / "one.parquet", tokenizer=TokenTexts(tokenizer_file)))
    assert data["num_other_texts"] == 2
    words = "".join(f" word{i - 14}" for i in rollouts[0].output_ids.tolist())
    save_rollouts(tmp_path / "right.parquet", [replace(rollouts[0], text=words)])
    if (rollouts[0].output_ids >= 14).all():
        data = data_of(page_of(tmp_path / "right.parquet", tokenizer=TokenTexts(tokenizer_file)))
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
        page_of(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(WireError, match=r"text\.parquet"):
        page_of(tmp_path / "text.parquet")


def test_the_same_run_twice_is_refused(scored_file):
    with pytest.raises(InvalidInputError, match="expected different runs"):
        page_of(scored_file, scored_file)


def test_progress_is_told(scored_file):
    seen = []

    def progress(rollouts):
        for rollout in rollouts:
            seen.append(rollout)
            yield rollout

    page_of(scored_file, progress=progress)
    assert len(seen) == 24
