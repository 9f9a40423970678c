"""The overview in a real browser, compared with the Parquet file. Console errors fail these tests."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_topp_client import add_trainer_columns, save_rollouts


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
    assert f"abort: {100 * aborts / 24:.1f}\N{NO-BREAK SPACE}%" in page.locator(".tile").first.inner_text()
    logprobs = [one for one in columns["candidate_logprobs"] if one is not None]
    masses = [np.exp(position).sum() for one in logprobs for position in one if position]
    assert float(tile(page, "mean kept mass")) == pytest.approx(np.mean(masses), abs=1e-4)
    run = page.evaluate("JSON.parse(document.getElementById('overview').textContent).runs[0]")
    verdict, metrics = run["verdict"], run["metrics"]
    assert page.locator(".sentence").inner_text().replace("\N{NO-BREAK SPACE}", " ") == (
        f"Without replay, ratios start at {metrics['start']['mean']:.3f} on average (should be 1):"
        f" {100 * verdict['off_1']:.1f} % are off by more than 1 %, and {100 * verdict['off_10']:.1f} %"
        f" by more than 10 %. With replay, they start at {metrics['replayed']['mean']:.3f}. Replay the sets."
    )
    assert page.locator("#distributions figure").count() == 5
    bars = page.locator("figure[data-metric=mass] .chart i").all()
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


def test_histograms_mark_the_ratio_1(open_page, page_file):
    page = open_page(page_file)
    for metric in ("ratio", "replayed"):
        chart, mark = (page.locator(f"figure[data-metric={metric}] {part}") for part in (".chart", ".mark"))
        low, high = (float(text) for text in chart.locator("+ .axis span").all_inner_texts())
        box, at = chart.bounding_box(), mark.bounding_box()["x"]
        assert (at - box["x"]) / box["width"] == pytest.approx((1 - low) / (high - low), abs=0.03)
    assert page.locator(".mark").count() == 2


def test_columns_are_chosen_as_axes_and_color(open_page, page_file, columns):
    page = open_page(page_file)
    known = [row for row in range(24) if columns["reward"][row] is not None]
    points = page.locator("[data-chart=scatter] [data-row]")
    assert [int(point.get_attribute("data-row")) for point in points.all()] == known
    bars = page.locator("[data-chart=histogram] i")
    assert sum(int(bar.get_attribute("data-count")) for bar in bars.all()) == len(known)
    lengths = np.array([len(columns["output_ids"][row]) for row in known])
    lefts = np.array([point.bounding_box()["x"] for point in points.all()])
    assert np.corrcoef(lengths, lefts)[0, 1] > 0.9999
    heights = np.array([point.bounding_box()["y"] for point in points.all()])
    assert np.corrcoef([columns["reward"][row] for row in known], heights)[0, 1] < -0.9999

    page.locator("select[name=y]").select_option("tokens")
    page.locator("select[name=color]").select_option("reward")
    assert points.count() == 24
    classes = [point.get_attribute("class") for point in points.all()]
    assert [classes[row] == "unknown" for row in range(24)] == [row not in known for row in range(24)]
    assert [classes[row] for row in known] == sorted(classes[row] for row in known)
    page.locator("[data-chart=scatter] [data-row='7']").press("Enter")
    page.locator("[aria-selected=true]").wait_for()
    assert page.url.endswith("#/rollout/7/0")


def test_groups_whose_rewards_are_equal_are_counted(open_page, write_page, tmp_path, rollouts):
    """Of the prompts 0 to 5, one has one known reward, and so counts as no group."""
    save_rollouts(tmp_path / "plain.parquet", rollouts)
    rewards = [
        *[1.0] * 4,
        *[0.0, 0.0, None, 0.0],
        *[0.0, 1.0] * 2,
        *[None] * 3,
        1.0,
        *[0.5] * 3,
        0.25,
        *[None] * 4,
    ]
    add_trainer_columns(tmp_path / "plain.parquet", tmp_path / "equal.parquet", rewards=rewards)
    page = open_page(write_page(tmp_path / "equal.parquet"))
    assert tile(page, "equal rewards") == "2 of 4"


def test_two_runs_are_overlaid(open_page, write_page, scored_file, tmp_path, rollouts):
    save_rollouts(tmp_path / "other.parquet", rollouts[5:15])
    page = open_page(write_page(scored_file, tmp_path / "other.parquet"))
    assert page.locator("#verdict h2").all_inner_texts() == ["scored.parquet", "other.parquet"]
    for run, of_run in enumerate((rollouts, rollouts[5:15])):
        bars = page.locator(f"figure[data-metric=sizes] .chart .run{run}").all()
        assert sum(int(bar.get_attribute("data-count")) for bar in bars) == sum(
            np.count_nonzero(one.candidates.sizes) for one in of_run
        )
        assert page.locator(f"figure[data-metric=sizes] .hint .run{run}").count() == 1
    page.get_by_label("Search the rollouts").fill("other.parquet prompt:7")
    (row,) = rows_of(page)[:1]
    page.locator(f"tr[data-row='{row}'] a").first.click()
    page.locator("#rollout-view h2", has_text="of other.parquet").wait_for()


def test_a_run_without_values_leaves_the_others_histogram_as_it_is(
    open_page, write_page, page_file, scored_file, tmp_path, rollouts
):
    save_rollouts(tmp_path / "plain.parquet", rollouts)
    two_runs = write_page(scored_file, tmp_path / "plain.parquet")

    def charts(file):
        page = open_page(file)
        found = {}
        for figure in ("[data-metric=ratio]", "[data-metric=replayed]", "[data-chart=histogram]"):
            bars = page.locator(f"figure{figure} .chart .run0")
            found[figure] = (
                page.locator(f"figure{figure} .axis span").all_inner_texts(),
                [bar.get_attribute("data-count") for bar in bars.all()],
            )
        return found

    assert charts(two_runs) == charts(page_file)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_prompt_and_the_title_are_in_view(open_page, page_file, scheme):
    page = open_page(page_file, color_scheme=scheme)
    row = page.locator("#table tr[data-row='9']")
    assert row.inner_text().split("\t")[2] == "3 2 3"
    page.goto(page.url + "#/rollout/9/90")
    page.locator("[aria-selected=true]").wait_for()
    assert page.locator("details .flow .t").all_inner_texts() == ["3", "2", "3"]
    page.mouse.wheel(0, 3000)
    for part in ("header h2", "header fieldset", "header .scale"):
        box = page.locator(part).bounding_box()
        assert 0 <= box["y"] < 200


def test_colors_of_the_kept_mass_begin_at_p(open_page, page_file):
    page = open_page(page_file, "#/rollout/9/0")
    assert page.get_by_role("radio", name="entropy").is_checked()
    page.get_by_role("radio", name="kept mass").check()
    names = page.locator("header .scale li").all_inner_texts()
    assert names[:2] == ["≤ 0.9", "0.9–0.9167"]


def test_columns_of_a_trainer_are_axes_and_sort_keys(open_page, write_page, scored_file, tmp_path):
    kl = np.random.default_rng(0).random(24) * 1e-6
    table = pq.read_table(scored_file).append_column("kl", pa.array(kl)).append_column("kl_at", pa.array(kl))
    pq.write_table(table, tmp_path / "more.parquet")
    page = open_page(write_page(tmp_path / "more.parquet"))
    for axis in ("x", "y", "color"):
        page.locator(f"select[name={axis}]").select_option("kl")
    assert page.locator("[data-chart=scatter] h3").inner_text() == "kl by kl"
    assert page.locator("[data-chart=scatter] [data-row]").count() == 24
    page.get_by_role("button", name="kl", exact=True).click()
    assert rows_of(page) == np.argsort(-kl).tolist()
    heads = [head.get_attribute("data-column") for head in page.locator("#table th").all()]
    assert (
        page.locator("#table tbody tr").first.locator("td").nth(heads.index("kl")).locator("a").count() == 0
    )
