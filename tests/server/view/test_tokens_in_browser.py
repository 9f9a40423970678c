"""The token view in a real browser, compared with the Parquet file. Console errors fail these tests."""

import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import load_rollouts, save_rollouts
from sglang_topp_server.view.token_text import TokenTexts


@pytest.fixture(scope="module")
def page_file(scored_file, write_page):
    return write_page(scored_file)


@pytest.fixture(scope="module")
def columns(scored_file):
    return pq.read_table(scored_file).to_pydict()


def bars_of(page):
    """Return `[(token id, probability, is sampled), …]` of the listed candidates."""
    return [
        (
            int(bar.get_attribute("data-id")),
            float(bar.locator(".value").inner_text()),
            bar.get_attribute("aria-current") == "true",
        )
        for bar in page.locator(".candidates li[data-id]").all()
    ]


def test_a_click_on_a_token_shows_the_candidates_of_the_file(open_page, page_file, columns):
    page = open_page(page_file)
    page.locator("#table tr[data-row='5'] a").first.click()
    page.wait_for_selector("[data-t='0']")
    for position in (0, 3, len(columns["output_ids"][5]) - 1):
        page.locator(f"[data-t='{position}']").click()
        ids, logprobs = columns["candidate_ids"][5][position], columns["candidate_logprobs"][5][position]
        sampled = columns["output_ids"][5][position]
        found = bars_of(page)
        assert [token_id for token_id, _, _ in found][:48] == ids[:48]
        by_id = dict(zip(ids, np.exp(logprobs), strict=True))
        for token_id, probability, is_sampled in found:
            assert probability == pytest.approx(by_id[token_id], abs=6e-5)
            assert is_sampled == (token_id == sampled)
        assert sum(is_sampled for _, _, is_sampled in found) == 1
        outside = float(page.locator(".candidates .outside .value").inner_text())
        assert outside == pytest.approx(max(0, 1 - sum(by_id.values())), abs=6e-5)
        if len(ids) > 48:
            rest = page.locator(".candidates .rest .name").inner_text()
            assert rest == f"{len(ids) - len(found):,} more in the set"
        widths = [bar.bounding_box()["width"] for bar in page.locator(".candidates [data-id] i").all()]
        shown = np.array([by_id[token_id] for token_id, _, _ in found])
        assert np.array(widths[:48]) == pytest.approx(
            np.maximum(1, shown / shown.max() * max(widths))[:48], abs=1.5
        )


@pytest.mark.parametrize("column", ["least", "largest", "worst_ratio"])
def test_the_worst_token_is_one_click_away(open_page, page_file, column):
    page = open_page(page_file)
    heads = [head.get_attribute("data-column") for head in page.locator("#table th").all()]
    page.locator(f"th[data-column={column}] button").click()
    link = page.locator("#table tbody tr").first.locator("td").nth(heads.index(column)).locator("a")
    row, position = re.match(r"#/rollout/(\d+)/(\d+)", link.get_attribute("href")).groups()
    value = link.inner_text()
    link.click()
    page.wait_for_selector(f"[data-t='{position}'][aria-selected=true]")
    assert page.locator(".candidates h3").inner_text() == f"Position {int(position):,}"
    assert value in page.locator(".candidates").inner_text()
    assert page.url.endswith(f"#/rollout/{row}/{position}")
    page.get_by_role("link", name="all rollouts").click()
    page.locator("#verdict").wait_for()


def test_keys_move_between_tokens(open_page, page_file, columns):
    page = open_page(page_file, "#/rollout/6/0")
    selected = page.locator("[aria-selected=true]")
    selected.wait_for()
    last = len(columns["output_ids"][6]) - 1
    for key, position in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("ArrowRight", last),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert selected.get_attribute("data-t") == str(position)
    page.keyboard.press("ArrowDown")
    below = int(selected.get_attribute("data-t"))
    page.keyboard.press("ArrowUp")
    assert 0 <= int(selected.get_attribute("data-t")) < below
    page.keyboard.press("Escape")
    page.locator("#verdict").wait_for()


def test_colors_follow_the_choice(open_page, page_file, columns):
    page = open_page(page_file, "#/rollout/7/0")
    page.locator("[aria-selected=true]").wait_for()
    page.get_by_role("radio", name="set size").check()
    bounds = [1, 2, 4, 10, 50, 500]
    for position in range(20):
        size = len(columns["candidate_ids"][7][position])
        expected = f"t c{sum(size > bound for bound in bounds)}"
        assert page.locator(f"[data-t='{position}']").get_attribute("class") == expected
    assert page.locator("header .scale li").count() == 8


def test_tools_and_pushes_are_marked(open_page, page_file, rollouts):
    page = open_page(page_file, "#/rollout/2/0")
    page.locator("[aria-selected=true]").wait_for()
    ((start, end),) = rollouts[2].appended_spans
    assert page.locator(".tokens .t.tool").count() == end - start == 3
    assert page.locator(".tick.weights").all_inner_texts() == ["weights 8", "weights 9"]
    assert page.locator(".tick.resumed + [data-t], .tick.resumed + .tick + [data-t]").get_attribute(
        "data-t"
    ) == str(end)
    page.locator(f"[data-t='{start}']").click()
    assert "no candidate set and no loss" in page.locator(".candidates").inner_text()
    assert bars_of(page) == []


@pytest.mark.parametrize("row", [3, 4])
def test_rollouts_without_logprobs_or_tokens(open_page, page_file, columns, row):
    page = open_page(page_file, f"#/rollout/{row}/0")
    page.locator(".tokens").wait_for()
    assert page.locator("[data-t]").count() == len(columns["output_ids"][row])
    if row == 3:
        ids = [int(bar.get_attribute("data-id")) for bar in page.locator(".candidates li[data-id]").all()]
        assert set(ids) <= set(columns["candidate_ids"][3][0])


def test_text_of_a_model_is_never_markup(open_page, write_page, tmp_path, tokenizer_file, make):
    rng = np.random.default_rng(0)
    bad = "".join(make.hostile)
    rollout = make.rollout(
        rng,
        0,
        0,
        14,
        text=bad,
        request_id=bad,
        finish_reason=bad,
        weight_spans=((bad, 7), ("8", 7)),
        weight_version=bad,
    )
    ids = np.arange(14, dtype=np.int32)
    logprobs = np.full(14, np.float32(np.log(0.9)))
    sets = CandidateSets(ids, logprobs, np.arange(15), ids)
    rollout = replace(rollout, output_ids=ids, prompt_ids=ids, logprobs=logprobs, candidates=sets)
    save_rollouts(tmp_path / "<img src=x>.parquet", [rollout])
    page = open_page(write_page(tmp_path / "<img src=x>.parquet", tokenizer=TokenTexts(tokenizer_file)))
    assert page.evaluate("window.hacked") is None
    page.locator("#table a").first.click()
    page.locator("[aria-selected=true]").wait_for()
    for t, text in enumerate(make.hostile):
        assert page.locator(f"[data-t='{t}']").evaluate("node => node.textContent") == text
    assert page.locator("[data-t='9']").inner_text() == "C3"
    assert page.locator("[data-t='12']").inner_text() == "U+200B"
    assert page.locator("[data-t='13']").inner_text() == "U+202E"
    assert page.locator("[data-t='7']").inner_text().startswith("↵")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('script').length") == 3
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.locator("#title").inner_text() == "<img src=x>.parquet"


def test_a_long_rollout_keeps_the_selected_token_on_the_screen(open_page, write_page, tmp_path, make):
    count = 32_000
    ids = np.arange(count, dtype=np.int32) % make.vocab
    logprobs = np.full(count, np.float32(-0.01))
    sets = CandidateSets(ids, logprobs, np.arange(count + 1), ids)
    rollout = make.rollout(np.random.default_rng(0), 0, 0, 8)
    rollout = replace(rollout, output_ids=ids, logprobs=logprobs, candidates=sets, weight_spans=None)
    save_rollouts(tmp_path / "long.parquet", [rollout])
    page = open_page(write_page(tmp_path / "long.parquet"), "#/rollout/0/0")
    selected = page.locator("[aria-selected=true]")
    selected.wait_for()
    for key, position in (("End", count - 1), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        assert selected.get_attribute("data-t") == str(position)
        box = selected.bounding_box()
        assert 0 <= box["y"] < 900


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["", "#/rollout/6/9"])
def test_a_phone_needs_no_sideways_scroll(open_page, page_file, scheme, place):
    page = open_page(page_file, place, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    if place:
        page.locator("[aria-selected=true]").wait_for()
        selected, panel = (
            page.locator("[aria-selected=true]").bounding_box(),
            page.locator(".candidates").bounding_box(),
        )
        assert 0 <= selected["y"] < panel["y"] < 844
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue > 384) == (scheme == "light")


def test_all_tokens_are_printed(open_page, page_file, scored_file, tmp_path):
    rollout = next(load_rollouts(scored_file))
    page = open_page(page_file, "#/rollout/0/0")
    page.locator("[aria-selected=true]").wait_for()
    page.pdf(path=tmp_path / "page.pdf")
    assert page.locator("[data-t]").count() == len(rollout.output_ids)


def test_a_rollout_without_detail_says_so(open_page, write_page, scored_file):
    page = open_page(write_page(scored_file, megabytes=0.02), "#/rollout/23/0")
    assert (
        page.locator("#rollout-view .hint, #rollout-view .warning")
        .first.inner_text()
        .startswith(("This page does not show rollout 23", "Reading"))
    )
    page.goto(page.url.split("#")[0])
    shown = page.locator("script[id^=detail]").count()
    assert f"shows {shown} of them" in page.locator("#notes").inner_text()
    assert 0 < shown < 24
