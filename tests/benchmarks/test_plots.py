"""Tables of benchmarks that name a picture are drawn into it; tables without a name are not."""

from __future__ import annotations

from benchmarks.harness import plots, result_files
from benchmarks.harness.paired_timing import compare_counts
from benchmarks.harness.result_files import Table


def test_tables_with_the_same_picture_name_share_one_picture(tmp_path):
    with result_files.collect_tables() as tables:
        compare_counts("near: linear", "MB", {"all": 8, "some": 2}, target=3.5, picture="sizes")
        compare_counts("far: logarithmic", "MB", {"all": 8e6, "more": 9e8, "some": 2}, picture="sizes")
        compare_counts("not drawn", "MB", {"all": 8, "some": 2})
        rounds = {"old": [4.0, 6.0, 9.0], "new": [2.0, 2.0, 1.0]}
        result_files.record(
            Table.from_rounds(rounds, title="times", unit="ms", better="faster", picture="times")
        )
    path = result_files.write("tables", tables, tmp_path)
    assert plots.draw(path) == [tmp_path / "sizes.png", tmp_path / "times.png"]
    first = {picture.name: picture.read_bytes() for picture in tmp_path.glob("*.png")}
    assert all(content.startswith(b"\x89PNG\r\n") and len(content) > 5000 for content in first.values())
    plots.draw(path)
    assert first == {picture.name: picture.read_bytes() for picture in tmp_path.glob("*.png")}
    assert sorted(first) == ["sizes.png", "times.png"]
