"""The overview in a real browser, compared with the Parquet file. Console errors fail these tests."""

import numpy as np
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="module")
def page_file(scored_file, write_page):
    return write_page(scored_file)


@pytest.fixture(scope="module")
def columns(scored_file):
    return pq.read_table(scored_file).to_pydict()


def tile(page, name):
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()


def rows_of(page):
    return [int(row.get_attribute("data-row")) for row in page.locator("#table tbody tr").all()]


def test_the_verdict(open_page, page_file, columns):
    page = open_page(page_file)
    assert tile(page, "rollouts") == str(len(columns["output_ids"]))
    assert tile(page, "tokens") == f"{sum(map(len, columns['output_ids'])):,}"
    assert tile(page, "missing sets") == "0"
    aborts = columns["finish_reason"].count("abort")
    assert f"abort: {aborts}" in page.locator(".tile").first.inner_text()
    logprobs = [one for one in columns["candidate_logprobs"] if one is not None]
    masses = [np.exp(position).sum() for one in logprobs for position in one if position]
    assert float(tile(page, "mean kept mass")) == pytest.approx(np.mean(masses), abs=1e-4)
    assert "Every generated token has its set" in page.locator(".sentence").inner_text()
    assert page.locator("#distributions figure").count() == 5
    bars = page.locator("figure[data-metric=mass] .bars li").all()
    assert sum(int(bar.get_attribute("data-count")) for bar in bars) == len(masses)


def test_the_table_sorts_and_searches(open_page, page_file, columns):
    page = open_page(page_file)
    assert rows_of(page) == list(range(24))
    lengths = [len(ids) for ids in columns["output_ids"]]
    page.get_by_role("button", name="tokens", exact=True).click()
    assert rows_of(page) == sorted(range(24), key=lambda row: (-lengths[row], row))
    page.get_by_role("button", name="tokens", exact=True).click()
    assert rows_of(page) == sorted(range(24), key=lambda row: (lengths[row], row))
    page.get_by_role("button", name="reward", exact=True).click()
    rewards = columns["reward"]
    known = [row for row in range(24) if rewards[row] is not None]
    unknown = [row for row in range(24) if rewards[row] is None]
    assert rows_of(page) == sorted(known, key=lambda row: -rewards[row]) + unknown
    page.get_by_label("Search the rollouts").fill("prompt:1 stop")
    assert set(rows_of(page)) == {5, 6, 7}
    page.get_by_label("Search the rollouts").fill("ABORT")
    assert set(rows_of(page)) == {1, 4}


def test_a_printed_page_is_white(open_page, page_file):
    page = open_page(page_file, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
