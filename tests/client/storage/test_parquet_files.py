"""Rollouts in files and directories: other readers, full disks, killed writers, altered bytes."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import Rollout, RolloutWriter, load_rollouts, save_rollouts
from sglang_topp_client.storage import parquet_files
from sglang_topp_client.storage.parquet_columns import to_batch, to_rollouts
from tests.client import conftest as fakes
from tests.client.conftest import bits
from tests.documentation_blocks import block_with


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rollouts"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.parquet"


@pytest.fixture(scope="session")
def variety():
    """Return rollouts of every kind."""
    one, two = (fakes.sample([5, 6], index) for index in range(2))
    sets = one.candidates
    tool = CandidateSets.concat([sets[:1], CandidateSets.empty(1), sets[2:]])
    a, b, c = one.output_ids.tolist()  # a tie, the largest log-prob, and a token that was impossible
    most = 2**31 - 1
    odd = CandidateSets([a, most, b, c + 1, c], [-0.5, -0.5, -0.0, -7.0, -np.inf], [0, 2, 3, 5], [a, b, c])
    return [
        one,
        replace(two, sample_index=2**63 - 1, text="é\0\n𝄞", request_id="", top_logprobs_source="sampler"),
        replace(one, candidates=None, top_logprobs_source=None, weight_spans=None),
        replace(one, candidates=sets.without_logprobs(), top_logprobs_source=None),
        replace(one, candidates=tool, finish_reason="abort"),
        replace(one, candidates=CandidateSets.empty(3), weight_spans=(("a", 0), ("b", 2), ("b", 1))),
        replace(one, prompt_ids=np.empty(0, np.int32), latency_s=1e-300, candidates=odd),
        fakes.without_tokens(one),
        replace(
            one,
            prompt_ids=np.array([-1 - most, most], np.int32),
            weight_version=None,
            routing_key="prompt@server",
            top_logprobs_p=0.9,
            sampling_params={"temperature": 0.5, "stop": ["é", None], "custom_params": {"a": [1]}},
            appended_spans=((0, 1), (2, 3)),
        ),
        replace(one, logprobs=np.array([0xFFC00001, 0x80000000, 1], np.uint32).view(np.float32)),
    ]


def write_to(folder, rollouts, **options):
    with RolloutWriter(folder, **options) as writer:
        for rollout in rollouts:
            writer.write(rollout)


def same(left, right):
    return [bits(one) for one in left] == [bits(one) for one in right]


def parts_of(folder):
    return sorted(one for one in folder.iterdir() if one.suffix == ".parquet")


# -- one file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_group_size", [1, 4, 256])
def test_every_bit_of_every_field_comes_back(path, variety, row_group_size):
    save_rollouts(path, iter(variety), row_group_size=row_group_size)
    assert same(load_rollouts(path), variety)
    assert pq.ParquetFile(path).metadata.num_row_groups == -(-len(variety) // row_group_size)


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 3))
def test_rows_in_any_order_come_back(variety, order, start):
    made = [variety[i] for i in order]
    assert same(to_rollouts(to_batch(made)[start:]), made[start:])


def test_a_file_of_no_rollouts_is_valid(path):
    save_rollouts(str(path), [])
    assert list(load_rollouts(str(path))) == []
    assert pq.read_table(path).num_rows == 0


def test_an_existing_path_is_refused_before_the_work_and_replaced_if_asked(path, variety):
    save_rollouts(path, variety)
    work = iter(variety[:1])
    with pytest.raises(
        InvalidInputError, match="got a path that exists, expected a new file; overwrite=True"
    ):
        save_rollouts(path, work)
    assert list(work) == variety[:1]
    assert same(load_rollouts(path), variety)
    save_rollouts(path, load_rollouts(path), overwrite=True)
    assert same(load_rollouts(path), variety)
    save_rollouts(path, variety[:1], overwrite=True)
    assert same(load_rollouts(path), variety[:1])
    with pytest.raises(InvalidInputError, match=r"expected a new file$"):
        save_rollouts(path.parent, variety, overwrite=True)


def test_a_file_appears_once_it_is_whole(path, variety):
    def broken():
        for rollout in variety:
            assert not path.exists()
            yield rollout
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        save_rollouts(path, broken(), row_group_size=2)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_are_checked_first(path, size):
    with pytest.raises(InvalidInputError, match="row_group_size"):
        save_rollouts(path, [], row_group_size=size)
    with pytest.raises(InvalidInputError, match="part_size"):
        RolloutWriter(path, part_size=size)
    assert not path.exists()


def test_a_row_group_ends_at_its_byte_limit(path, folder, variety, monkeypatch):
    monkeypatch.setattr(parquet_files, "_MAX_GROUP_BYTES", 100)
    save_rollouts(path, variety)
    write_to(folder, variety)
    assert pq.ParquetFile(path).metadata.num_row_groups == len(parts_of(folder)) > len(variety) // 2
    assert same(load_rollouts(path), variety)
    assert same(load_rollouts(folder), variety)


# -- a directory -----------------------------------------------------------------------------------


def test_a_directory_is_read_while_it_is_written(folder, variety):
    with RolloutWriter(folder, part_size=2) as writer:
        assert list(load_rollouts(folder)) == []
        for count, rollout in enumerate(variety, 1):
            writer.write(rollout)
            assert writer.num_rollouts == count // 2 * 2
            assert same(load_rollouts(folder), variety[: count // 2 * 2])
        writer.flush()
        writer.flush()
        assert same(load_rollouts(folder), variety)
        assert writer.num_rollouts == len(variety)
    assert len(parts_of(folder)) == -(-len(variety) // 2)
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []


def test_two_runs_are_not_mixed_by_accident(folder, variety):
    for one in variety[:3]:
        write_to(folder, [one], append=True)
    with pytest.raises(InvalidInputError, match="got a directory with 3 parts, expected none; append=True"):
        RolloutWriter(folder)
    assert same(load_rollouts(folder), variety[:3])
    parts_of(folder)[0].unlink()
    write_to(folder, variety[:1], append=True)
    assert same(load_rollouts(folder), [*variety[1:3], variety[0]])


def test_a_writer_refuses_a_path_that_is_a_file(path, variety):
    save_rollouts(path, variety)
    with pytest.raises(InvalidInputError, match="got a file, expected a directory or a new path"):
        RolloutWriter(path, append=True)


def test_two_writers_may_share_a_directory(folder, variety):
    with RolloutWriter(folder, part_size=2) as one, RolloutWriter(folder, part_size=3) as other:
        for rollout in variety[:6]:
            one.write(rollout)
            other.write(rollout)
    assert len(parts_of(folder)) == 5
    both = [bits(rollout) for rollout in load_rollouts(folder)]
    assert all(both.count(bits(rollout)) == 2 for rollout in variety[:6])


def test_an_invalid_rollout_changes_nothing(folder, variety):
    with RolloutWriter(folder) as writer:
        writer.write(variety[0])
        with pytest.raises(InvalidInputError, match="logprobs: got 2 for 3 output_ids"):
            writer.write(replace(variety[0], logprobs=np.zeros(2, np.float32)))
        writer.write(variety[1])
    assert same(load_rollouts(folder), variety[:2])
    with pytest.raises(InvalidInputError, match="this writer is closed"):
        writer.write(variety[0])
    with pytest.raises(InvalidInputError, match="this writer is closed"):
        writer.flush()
    writer.close()


def test_rollouts_before_an_error_are_kept(folder, variety):
    def broken():
        yield variety[0]
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        write_to(folder, broken())
    assert same(load_rollouts(folder), variety[:1])


# -- full disks, killed writers --------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["open", "write", "fsync", "replace", "directory"])
def test_a_write_that_failed_is_repeated_once(folder, variety, monkeypatch, fault):
    """Each step of a write fails in turn. A repeated call stores its rollout once."""
    with RolloutWriter(folder, part_size=2) as writer:
        for rollout in variety[:2]:
            writer.write(rollout)
        with monkeypatch.context() as broken:
            fail_at(broken, fault)
            writer.write(variety[2])
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device") as error:
                    writer.write(variety[3])
                assert error.value.filename.startswith(str(folder))
                assert error.value.errno == 28
                assert same(load_rollouts(folder), variety[:2])
                assert writer.num_rollouts == 2
            with pytest.raises(OSError, match="No space left on device"):
                writer.close()
        assert list(folder.glob(".*")) == []
        writer.write(variety[3])
        assert same(load_rollouts(folder), variety[:4])
        writer.write(variety[4])
    assert same(load_rollouts(folder), variety[:5])


def fail_at(monkeypatch, fault):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    opened = {
        "open": lambda path, mode="r", **_: full() if mode == "wb" else OPEN(path, mode),
        "write": lambda *given, **named: Full(OPEN(*given, **named)),
    }
    if fault in opened:
        monkeypatch.setattr("builtins.open", opened[fault])
    elif fault == "directory":
        monkeypatch.setattr(parquet_files, "sync_directory", full)
    else:
        monkeypatch.setattr(os, fault, full)


OPEN = open


class Full:
    """A file on a disk with a hundred free bytes."""

    def __init__(self, file):
        self._file, self._left = file, 100

    def write(self, data):
        self._left -= self._file.write(data[: self._left])
        if not self._left:
            raise OSError(28, "No space left on device")
        return len(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self._file.__enter__()

    def __exit__(self, *given):
        return self._file.__exit__(*given)


FULL_DISK = """
import sys
from pathlib import Path
from sglang_topp_client import RolloutWriter, load_rollouts, save_rollouts
from sglang_topp_client.wire.records import to_record
rollouts, disk = list(load_rollouts(sys.argv[1])), Path(sys.argv[2])
writer, count = RolloutWriter(disk / "run", part_size=len(rollouts)), 0
try:
    while True:
        writer.write(rollouts[count % len(rollouts)])
        count += 1
except OSError as error:
    assert error.errno == 28 and error.filename.startswith(str(disk)), error
try:
    save_rollouts(disk / "one.parquet", rollouts * 50)
except OSError as error:
    assert error.errno == 28 and error.filename == str(disk / "one.parquet"), error
else:
    raise AssertionError("it fits")
whole = list(load_rollouts(disk / "run"))
assert whole and len(whole) == writer.num_rollouts, (len(whole), writer.num_rollouts)
# Room is made: the rollout that was refused is written again.
(disk / "ballast").unlink()
writer.write(rollouts[count % len(rollouts)])
writer.close()
expected = [to_record(rollouts[i % len(rollouts)]) for i in range(count + 1)]
assert [to_record(one) for one in load_rollouts(disk / "run")] == expected
assert sorted(one.name for one in disk.iterdir()) == ["run"]
print(len(expected), len(list((disk / "run").iterdir())))
"""


def test_a_full_disk_is_an_error_and_loses_nothing(path, tmp_path):
    """Write to a file system of 300 KB in a separate mount namespace. Nothing goes to $TMPDIR."""
    disk = tmp_path / "disk"
    disk.mkdir()
    save_rollouts(path, [fakes.sample([5], index) for index in range(3)])
    command = (
        f"mount -t tmpfs -o size=300k none {disk} && head -c 100000 /dev/zero > {disk}/ballast"
        f' && exec {sys.executable} -c "$0" {path} {disk}'
    )
    unshare = ["unshare", "--mount", "--map-root-user"] if shutil.which("unshare") else ["false"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing for this user")
    done = subprocess.run(
        [*unshare, "sh", "-c", command, FULL_DISK],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "none")},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 3


def test_a_killed_writer_loses_the_part_in_progress_alone(path, tmp_path):
    program = """
import sys
from itertools import count
from sglang_topp_client import RolloutWriter, load_rollouts
rollouts = list(load_rollouts(sys.argv[1]))
writer = RolloutWriter(sys.argv[2], part_size=2)
for number in count():
    writer.write(rollouts[number % 2])
    print(writer.num_rollouts, flush=True)
"""
    pair = [fakes.sample([5], index) for index in range(2)]
    save_rollouts(path, pair)
    for number, at_least in enumerate([1, 21]):
        other = tmp_path / f"killed-{number}"
        command = [sys.executable, "-c", program, str(path), str(other)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            told = next(count for count in map(int, process.stdout) if count >= at_least)
            process.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        rollouts = list(load_rollouts(other))
        assert len(rollouts) >= told
        assert same(rollouts, pair * (len(rollouts) // 2))
        write_to(other, pair, append=True)
        assert same(load_rollouts(other), [*rollouts, *pair])
        assert pa.dataset.dataset(other).count_rows() == len(rollouts) + 2


# -- altered bytes ---------------------------------------------------------------------------------


def test_an_altered_byte_names_the_file(path, variety):
    """An altered byte is an error, or lies in the bytes that readers ignore."""
    save_rollouts(path, variety, row_group_size=4)
    raw, chance = path.read_bytes(), random.Random(0)
    expected, num_errors, fields_at_fault = [bits(one) for one in variety], 0, set()
    for at in sorted({*range(60), *chance.sample(range(len(raw)), 600), *range(len(raw) - 200, len(raw))}):
        altered = bytearray(raw)
        altered[at] ^= 1 << chance.randrange(8)
        path.write_bytes(altered)
        try:
            assert [bits(one) for one in load_rollouts(path)] == expected, at
        except WireError as error:
            fields_at_fault.add(error.field)
            num_errors += 1
    assert fields_at_fault == {str(path)}
    assert num_errors > 300


def test_rollouts_before_an_altered_part_are_yielded(folder, variety):
    write_to(folder, variety, part_size=3)
    part = parts_of(folder)[1]
    raw = bytearray(part.read_bytes())
    raw[200] ^= 1
    part.write_bytes(raw)
    rollouts = load_rollouts(folder)
    assert same(islice(rollouts, 3), variety[:3])
    with pytest.raises(WireError, match=rf"{re.escape(str(part))}: cannot be read, so it was cut or altered"):
        next(rollouts)


def test_a_cut_file_is_an_error(path, variety):
    save_rollouts(path, variety, row_group_size=4)
    raw = path.read_bytes()
    for size in {0, 2, 4, 5, 20, *range(4, len(raw), 997), len(raw) - 1}:
        path.write_bytes(raw[:size])
        with pytest.raises(WireError, match=f"{path}: cannot be read, so it was cut or altered"):
            list(load_rollouts(path))


def test_a_file_with_other_columns_is_refused(path):
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(WireError, match="prompt_index: got no such column, expected int64"):
        list(load_rollouts(path))
    path.write_bytes(b"{}")
    with pytest.raises(WireError, match="cannot be read"):
        list(load_rollouts(path))
    # The call itself raises. A generator would raise only in the loop.
    with pytest.raises(FileNotFoundError):
        load_rollouts(path.with_name("none"))


# -- files that other programs rewrote -------------------------------------------------------------


def duckdb_rewrites(path, target):
    import duckdb

    duckdb.sql(f"copy (select *, 1 as more from '{path}') to '{target}' (format parquet)")


def pandas_rewrites(path, target):
    frame = pandas.read_parquet(path)
    frame["more"] = range(len(frame))
    frame.sort_index(axis=1).to_parquet(target)


def rows_of_datasets(path, cache):
    import datasets

    files = {"data_files": str(path)} if path.is_file() else {"data_dir": str(path)}
    return datasets.load_dataset("parquet", split="train", cache_dir=str(cache), **files)


def datasets_rewrites(path, target):
    rows = rows_of_datasets(path, target.with_name("cache"))
    rows.add_column("more", list(range(len(rows)))).to_parquet(str(target))


def with_other_types(path, target, kind_of):
    """Rewrite a file with a type for each column, or with none for those that stay."""
    table = pq.read_table(path)
    columns = {name: table.column(name) for name in table.column_names}
    for field in table.schema:
        if (kind := kind_of(field)) is not None:
            columns[field.name] = pa.array(columns[field.name].to_pylist(), kind)
    pq.write_table(pa.table(columns), target)


def with_the_types_of_polars(path, target):
    """Polars stores large lists and large strings, and its categories are dictionaries."""

    def large(kind):
        if pa.types.is_list(kind):
            return pa.large_list(large(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(one.name, large(one.type)) for one in reversed(list(kind))])
        return pa.large_string() if pa.types.is_string(kind) else kind

    categories = pa.dictionary(pa.int32(), pa.large_string())
    with_other_types(path, target, lambda one: categories if one.name == "finish_reason" else large(one.type))


def with_wide_numbers(path, target):
    wide = {"prompt_index": pa.float64(), "cached_tokens": pa.uint8(), "output_ids": pa.list_(pa.int64())}
    wide["candidate_logprobs"] = pa.list_(pa.list_(pa.float64()))
    with_other_types(path, target, lambda field: wide.get(field.name))


@pytest.mark.parametrize("are_all_null", [False, True], ids=["values", "nulls"])
@pytest.mark.parametrize(
    "rewrite",
    [duckdb_rewrites, pandas_rewrites, datasets_rewrites, with_the_types_of_polars, with_wide_numbers],
)
def test_a_rewritten_file_loads(path, tmp_path, variety, rewrite, are_all_null):
    rollouts = variety[:-1]  # the last one has NaN as log-probs, which pandas stores as null
    if are_all_null:
        nulls = dict.fromkeys(["candidates", "weight_spans", "weight_version", "sampling_params"])
        rollouts = [replace(one, **nulls, top_logprobs_source=None) for one in rollouts]
    save_rollouts(path, rollouts)
    target = tmp_path / "rewritten.parquet"
    rewrite(path, target)
    assert pq.read_schema(target) != pq.read_schema(path)
    assert same(load_rollouts(target), rollouts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": None}, "output_ids: got no such column, expected list<element: int32 not null>"),
        ({"routing_key": None, "text": None}, "text: got no such column"),
        ({"output_ids": [[1, 2, 2**31]]}, "output_ids: got int64, expected int32: .*2147483648"),
        ({"output_ids": [[1.5, 2, 3]]}, "output_ids: got double, expected int32"),
        ({"output_ids": [[1, None, 3]]}, "output_ids: got null, expected int32"),
        ({"output_ids": [["1", "2", "3"]]}, "output_ids: got string, expected int32"),
        ({"output_ids": [7]}, "output_ids: got int64, expected list"),
        ({"logprobs": [[-0.1, -0.2, -0.3]]}, "logprobs: got double, expected float: a value would change"),
        ({"candidate_ids": [[[1], None, [3]]]}, "candidate_ids: got null, expected list"),
        ({"prompt_index": [True]}, "prompt_index: got bool, expected int64"),
        ({"prompt_index": [None]}, "prompt_index: got null, expected int64"),
        ({"cached_tokens": np.array([2**63], np.uint64)}, "cached_tokens: got uint64, expected int64"),
        ({"weight_version": [7]}, "weight_version: got int64, expected string"),
        ({"text": [b"raw"]}, "text: got binary, expected string"),
        ({"appended_spans": [[{"start": 0}]]}, "appended_spans: got no end"),
        ({"weight_versions": [[7]]}, "weight_versions: got int64, expected struct"),
    ],
)
def test_a_column_that_cannot_be_read_is_named(path, variety, changes, message):
    save_rollouts(path, variety[:1])
    table = pq.read_table(path)
    columns = {name: table.column(name) for name in table.column_names}
    columns |= {name: pa.array(values) for name, values in changes.items() if values is not None}
    left = {name: column for name, column in columns.items() if changes.get(name, 1) is not None}
    pq.write_table(pa.table(left), path)
    with pytest.raises(WireError, match=f"{path}: {message}"):
        list(load_rollouts(path))


# -- other readers ---------------------------------------------------------------------------------


@pytest.fixture
def growing(folder, variety):
    """Return a directory with two parts, one unfinished part of its writer, and one of a killed writer."""
    write_to(folder, variety, part_size=len(variety) // 2)
    (folder / ".part-000009-00000000.parquet.tmp").write_bytes(b"PAR1 and what came until then")
    with RolloutWriter(folder, append=True) as writer:
        writer.write(variety[0])
        yield folder


def rows_of_duckdb(folder, cache):
    import duckdb

    found = duckdb.sql(f"select * from '{folder}/*.parquet'")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


READERS = {
    "pyarrow": lambda folder, cache: pa.dataset.dataset(folder).to_table().to_pylist(),
    "pandas": lambda folder, cache: pandas.read_parquet(folder).to_dict("records"),
    "datasets": rows_of_datasets,
    "duckdb": rows_of_duckdb,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_other_programs_read_a_directory(growing, variety, tmp_path, read):
    rows = read(growing, tmp_path / "cache")
    assert [row["finish_reason"] for row in rows] == [one.finish_reason for one in variety]
    for row, one in zip(rows, variety, strict=True):
        assert (row["candidate_ids"] is None) == (one.candidates is None)
        if one.candidates is not None:
            assert [list(ids) for ids in row["candidate_ids"]] == [ids.tolist() for ids, _ in one.candidates]
    assert list(rows[0]["weight_versions"]) == [
        {"version": "step-6", "start": 0, "end": 1},
        {"version": "step-7", "start": 1, "end": 3},
    ]


def test_readers_beside_a_writer_see_whole_parts(folder, path):
    """Another process writes up to 100 parts per second. A reader never sees an incomplete part.

    The number of parts to read grows while they are read, so a faster writer could outrun the readers.
    """
    import duckdb

    program = """
import sys, time
from sglang_topp_client import RolloutWriter, load_rollouts
(rollout,) = load_rollouts(sys.argv[1])
with RolloutWriter(sys.argv[2], part_size=5) as writer:
    while True:
        writer.write(rollout)
        time.sleep(0.002)
"""
    save_rollouts(path, [fakes.sample([5], 0)])
    with subprocess.Popen([sys.executable, "-c", program, str(path), str(folder)]) as process:
        try:
            while not folder.exists() or not parts_of(folder):
                time.sleep(0.05)
            counts = [0]
            for _ in range(10):
                counts.append(sum(1 for _ in load_rollouts(folder)))
                counts.append(pa.dataset.dataset(folder).count_rows())
                ((found,),) = duckdb.sql(f"select count(text) from '{folder}/*.parquet'").fetchall()
                counts.append(found)
        finally:
            process.kill()
    assert counts == sorted(counts)
    assert all(count % 5 == 0 for count in counts)


def test_a_file_is_streamed_both_ways(path):
    """A hundred row groups are read. Arrow and Python hold only a few of them at once."""
    num_tokens, num_candidates = 128, 64
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((num_tokens, 1000)), axis=1)[:, :num_candidates].astype(np.int32)
    logprobs = np.sort(-rng.random((num_tokens, num_candidates)).astype(np.float32) - 5)[:, ::-1]
    sets = CandidateSets(
        ids.ravel(), logprobs.ravel(), np.arange(num_tokens + 1) * num_candidates, ids[:, 0].copy()
    )
    rollout = Rollout(
        0, 0, "r", ids[:, 0].copy(), ids[:, 0].copy(), "", sets.sampled_logprobs, sets, "stop", "", 0, 0.0
    )
    program = r"""
import re, sys
from itertools import repeat
from sglang_topp_client import load_rollouts, save_rollouts
def peak():  # not ru_maxrss, which begins at the parent's
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
(rollout,) = load_rollouts(sys.argv[1])
held = []
for path, number in ((sys.argv[2], 16), (sys.argv[3], 1600)):
    save_rollouts(path, repeat(rollout, number), row_group_size=16)
    assert sum(1 for _ in load_rollouts(path)) == number
    held.append(peak())
print(held[1] - held[0])
"""
    save_rollouts(path, [rollout])
    paths = (path, path.with_name("small"), path.with_name("large"))
    done = fakes.run_python(program, *map(str, paths))
    one_group = 16 * (sets.token_ids.nbytes + sets.logprobs.nbytes)
    assert int(done.stdout) < 50 * one_group, done.stdout


def test_a_missing_extra_is_named(path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from sglang_topp_client import load_rollouts, save_rollouts\n"
        "for call in (lambda: load_rollouts('x'), lambda: save_rollouts(sys.argv[1], [])):\n"
        "    try: call()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    assert fakes.run_python(code, str(path)).stdout.count("pip install 'sglang-topp[data]'") == 2
    assert not path.exists()


def test_the_documented_example_runs(tmp_path, monkeypatch, capsys, variety):
    monkeypatch.chdir(tmp_path)
    exec(block_with("how-to/saved-rollouts.md", "RolloutWriter("), {"rollouts": variety})
    assert len(capsys.readouterr().out.splitlines()) == len(variety)
    assert same(load_rollouts("step-0.parquet"), variety)
