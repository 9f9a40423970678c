"""Files of rollouts: written, appended to, read by us and others, cut, altered, left by a killed process."""

import errno
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, TruncatedFileError, WireError
from sglang_topp_client import Rollout, RolloutWriter, load_rollouts, save_rollouts
from sglang_topp_client import records as module
from sglang_topp_client.record_frames import walk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.parquet"


@pytest.fixture(scope="session")
def variety(fakes_once):
    """Rollouts of every kind that there is."""
    one, two = (fakes_once.sample([5, 6], index) for index in range(2))
    sets = one.candidates
    tool = CandidateSets.concat([sets[:1], CandidateSets.empty(1), sets[2:]])
    none = np.empty(0, np.int32)
    return [
        one,
        replace(two, sample_index=2**63 - 1, text="é\0\n𝄞", request_id="", top_logprobs_source="sampler"),
        replace(one, candidates=None, top_logprobs_source=None, weight_spans=None),
        replace(one, candidates=sets.without_logprobs(), top_logprobs_source=None),
        replace(one, candidates=tool, finish_reason="abort"),
        replace(one, candidates=CandidateSets.empty(3), weight_spans=(("a", 0), ("b", 2), ("b", 1))),
        replace(one, prompt_ids=none, latency_s=1e-300),
        replace(
            one,
            output_ids=none,
            logprobs=np.empty(0, np.float32),
            candidates=CandidateSets.empty(0),
            weight_spans=(),
        ),
        replace(one, logprobs=np.array([0xFFC00001, 0x80000000, 1], np.uint32).view(np.float32)),
    ]


def bits(rollout):
    """Every field, such that two are equal where all their bits are."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    sets = values.pop("candidates")
    if sets is not None:
        values["sets"] = [sets.token_ids, sets.offsets, sets.sampled_ids]
        values["sets"] += [sets.logprobs] if sets.has_logprobs else []
    return {name: _bits(value) for name, value in values.items()}


def _bits(value):
    if isinstance(value, list):
        return [_bits(one) for one in value]
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def same(left, right):
    return [bits(one) for one in left] == [bits(one) for one in right]


@pytest.mark.parametrize("row_group_size", [1, 4, 256])
def test_every_bit_of_every_field_comes_back(path, variety, row_group_size):
    save_rollouts(path, iter(variety), row_group_size=row_group_size)
    assert same(load_rollouts(path), variety)
    assert pq.ParquetFile(path).metadata.num_row_groups == -(-len(variety) // row_group_size)


def test_no_rollouts_are_a_file(path):
    save_rollouts(str(path), [])
    assert list(load_rollouts(str(path))) == []
    assert pq.read_table(path).num_rows == 0


def test_a_file_that_is_there_is_not_lost(path, variety):
    save_rollouts(path, variety)
    with pytest.raises(InvalidInputError, match="there is a file already; append=True adds to it"):
        save_rollouts(path, variety[:1])
    assert same(load_rollouts(path), variety)


def test_appending(path, variety):
    for start in range(3):
        save_rollouts(path, variety[start : start + 1], append=True)
    save_rollouts(path, variety[3:], append=True, row_group_size=2)
    assert same(load_rollouts(path), variety)
    raw = path.read_bytes()
    with RolloutWriter(path, append=True) as writer:
        assert writer.num_rollouts == len(variety)
    assert path.read_bytes() == raw


def test_what_is_appended_to_an_empty_file(path, variety):
    save_rollouts(path, [])
    save_rollouts(path, variety, append=True)
    assert same(load_rollouts(path), variety)


def test_flush_makes_it_durable(path, variety):
    with RolloutWriter(path) as writer:
        writer.write(variety[0])
        writer.write(variety[1])
        assert writer.num_rollouts == 0
        writer.flush()
        writer.flush()
        assert writer.num_rollouts == 2
        writer.write(variety[2])
        # Others see no file yet; we see what there is.
        with pytest.raises(pa.ArrowInvalid):
            pq.ParquetFile(path)
        rollouts = load_rollouts(path)
        assert same(islice(rollouts, 2), variety[:2])
        with pytest.raises(TruncatedFileError, match="footer: missing behind 1 row groups"):
            next(rollouts)
    assert same(load_rollouts(path), variety[:3])


def test_what_came_before_an_error_is_kept(path, variety):
    def broken():
        yield from variety
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        save_rollouts(path, broken())
    assert same(load_rollouts(path), variety)


def test_a_rollout_that_is_none_changes_nothing(path, variety):
    with RolloutWriter(path) as writer:
        writer.write(variety[0])
        with pytest.raises(InvalidInputError, match="logprobs: got 2 for 3 output_ids"):
            writer.write(replace(variety[0], logprobs=np.zeros(2, np.float32)))
        writer.write(variety[1])
    assert same(load_rollouts(path), variety[:2])
    with pytest.raises(InvalidInputError, match="this writer is closed"):
        writer.write(variety[0])
    with pytest.raises(InvalidInputError, match="this writer is closed"):
        writer.flush()
    writer.close()


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_the_size_of_a_row_group_is_checked_first(path, size):
    with pytest.raises(InvalidInputError, match="row_group_size"):
        RolloutWriter(path, row_group_size=size)
    assert not path.exists()


def test_one_writer_at_a_time(path, variety):
    with RolloutWriter(path) as writer:
        with pytest.raises(InvalidInputError, match="another writer has it open"):
            RolloutWriter(path, append=True)
        writer.write(variety[0])
    assert same(load_rollouts(path), variety[:1])


def test_a_row_group_has_an_end_in_bytes(path, variety, monkeypatch):
    monkeypatch.setattr(module, "_MAX_GROUP_BYTES", 100)
    save_rollouts(path, variety)
    assert pq.ParquetFile(path).metadata.num_row_groups > len(variety) // 2
    assert same(load_rollouts(path), variety)


def test_a_full_disk_loses_no_row_group(path, variety, monkeypatch):
    save_rollouts(path, variety, row_group_size=3)
    write_all, is_full = module._write_all, True

    def limited(file, data):
        if is_full and len(data) > 100:
            write_all(file, data[:100])
            raise OSError(errno.ENOSPC, "no space")
        write_all(file, data)

    monkeypatch.setattr(module, "_write_all", limited)
    with RolloutWriter(path, append=True, row_group_size=2) as writer:
        writer.write(variety[0])
        with pytest.raises(OSError, match="no space"):
            writer.write(variety[1])
        assert writer.num_rollouts == len(variety)
        assert same(_until_cut(path), variety)
        # What did not fit has stayed with the writer.
        is_full = False
    assert same(load_rollouts(path), [*variety, *variety[:2]])

    is_full = True
    writer = RolloutWriter(path, append=True)
    writer.write(variety[2])
    with pytest.raises(OSError, match="no space"):
        writer.close()
    assert same(_until_cut(path), [*variety, *variety[:2]])


def test_a_killed_writer_leaves_whole_row_groups(path, fakes):
    program = """
import sys
from itertools import count
from sglang_topp_client import RolloutWriter, load_rollouts
rollouts = list(load_rollouts(sys.argv[1]))
writer = RolloutWriter(sys.argv[2], row_group_size=2)
for number in count():
    writer.write(rollouts[number % 2])
    print(writer.num_rollouts, flush=True)
"""
    pair = [fakes.sample([5], index) for index in range(2)]
    save_rollouts(path, pair)
    for number, at_least in enumerate([1, 21]):
        other = path.with_name(f"killed-{number}")
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(other)], stdout=subprocess.PIPE, text=True
        ) as process:
            told = next(count for count in map(int, process.stdout) if count >= at_least)
            process.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        with pytest.raises(TruncatedFileError):
            list(load_rollouts(other))
        rollouts = list(_until_cut(other))
        assert len(rollouts) >= told
        assert same(rollouts, pair * (len(rollouts) // 2))
        save_rollouts(other, pair, append=True)
        assert same(load_rollouts(other), [*rollouts, *pair])
        assert pq.read_table(other).num_rows == len(rollouts) + 2


def _until_cut(path):
    try:
        yield from load_rollouts(path)
    except TruncatedFileError:
        return


def test_cut_anywhere_it_is_gone_on_with(path, variety):
    save_rollouts(path, variety, row_group_size=4)
    raw = path.read_bytes()
    with open(path, "rb") as file:
        ends = [(frame.end, frame.is_closing) for frame in walk(file)]
    places = {0, 2, 4, 5, 20, *range(4, len(raw), 997)}
    places |= {end + step for end, _ in ends for step in (-1, 0, 1, 30)}
    for size in sorted(place for place in places if place < len(raw)):
        path.write_bytes(raw[:size])
        whole = 4 * sum(end <= size for end, is_closing in ends if not is_closing)
        rollouts = list(_until_cut(path))
        assert same(rollouts, variety[:whole])
        save_rollouts(path, variety[whole:], append=True)
        assert same(load_rollouts(path), variety), size


def test_nothing_is_appended_to_what_was_altered(path, variety):
    save_rollouts(path, variety, row_group_size=4)
    with open(path, "rb") as file:
        frames = list(walk(file))
    raw = path.read_bytes()

    def altered(at, size=None):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 : size]
        path.write_bytes(changed)
        return changed

    for at in (0, 5, frames[1].start - 3, frames[1].end - 1, len(raw) - 6):
        changed = altered(at)
        with pytest.raises(WireError):
            RolloutWriter(path, append=True)
        assert path.read_bytes() == changed
    # The pages of the last row group are looked at where no footer says that they came to the disk.
    changed = altered(frames[1].start + 9, frames[1].end)
    with pytest.raises(WireError, match="row group 1: its pages have the CRC-32"):
        RolloutWriter(path, append=True)
    assert path.read_bytes() == changed


def test_altered_pages_name_their_row_group(path, variety):
    save_rollouts(path, variety, row_group_size=4)
    with open(path, "rb") as file:
        frames = list(walk(file))
    raw = bytearray(path.read_bytes())
    raw[frames[1].start + 9] ^= 1
    path.write_bytes(raw)
    rollouts = load_rollouts(path)
    assert same(islice(rollouts, 4), variety[:4])
    with pytest.raises(WireError, match=r"row group 1: its pages have the CRC-32 .* altered"):
        next(rollouts)


def test_a_file_of_others_is_refused(path):
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(WireError, match=r"row group 0: got .* is no file of rollouts"):
        list(load_rollouts(path))
    with pytest.raises(WireError, match="row group 0"):
        RolloutWriter(path, append=True)
    path.write_bytes(b"{}")
    # At the call: what a loop would show only later.
    with pytest.raises(WireError, match="file: begins with"):
        load_rollouts(path)
    with pytest.raises(FileNotFoundError):
        load_rollouts(path.with_name("none"))


def test_the_version_stands_in_the_file(path, variety):
    save_rollouts(path, variety)
    assert pq.read_metadata(path).metadata[b"sglang_topp.rollouts.version"] == b"1"


def test_pyarrow_reads_it_and_checks_its_pages(path, variety):
    save_rollouts(path, variety, row_group_size=4)
    table = pq.read_table(path, page_checksum_verification=True)
    assert table.column("text").to_pylist() == [one.text for one in variety]
    sets = [one.candidates for one in variety]
    lists = [None if one is None else [ids.tolist() for ids, _ in one] for one in sets]
    assert table.column("candidate_ids").to_pylist() == lists


def test_pandas_reads_it(path, variety):
    pandas = pytest.importorskip("pandas", reason="SGLang brings it; the client does without")
    save_rollouts(path, variety, row_group_size=4)
    frame = pandas.read_parquet(path)
    sets = variety[0].candidates
    assert [row.tolist() for row in frame.candidate_ids[0]] == [sets[t][0].tolist() for t in range(3)]
    assert [row.tolist() for row in frame.candidate_logprobs[0]] == [sets[t][1].tolist() for t in range(3)]
    assert frame.candidate_logprobs[3] is None
    assert frame.finish_reason.tolist() == [one.finish_reason for one in variety]


def test_datasets_reads_it(path, variety, tmp_path):
    datasets = pytest.importorskip("datasets", reason="SGLang brings it; the client does without")
    save_rollouts(path, variety, row_group_size=4)
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert rows.num_rows == len(variety)
    sets = variety[0].candidates
    assert rows[0]["candidate_ids"] == [sets[t][0].tolist() for t in range(3)]
    assert rows[0]["weight_versions"] == [
        {"version": "step-6", "start": 0, "end": 1},
        {"version": "step-7", "start": 1, "end": 3},
    ]
    assert rows[2]["candidate_ids"] is None


def test_duckdb_reads_it(path, variety):
    import duckdb

    save_rollouts(path, variety, row_group_size=4)
    found = duckdb.sql(
        f"select candidate_ids, len(candidate_ids[1]) from '{path}' where finish_reason = 'abort'"
    ).fetchall()
    sets = variety[4].candidates
    assert found == [([sets[t][0].tolist() for t in range(3)], sets.sizes[0])]


def test_a_file_is_streamed_both_ways(path):
    """Forty row groups pass through; what Arrow and Python hold at once is a few."""
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
    program = """
import resource, sys
from itertools import repeat
from sglang_topp_client import load_rollouts, save_rollouts
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(rollout,) = load_rollouts(sys.argv[1])
held = []
for path, number in ((sys.argv[2], 16), (sys.argv[3], 640)):
    save_rollouts(path, repeat(rollout, number), row_group_size=16)
    assert sum(1 for _ in load_rollouts(path)) == number
    held.append(peak())
print(held[1] - held[0])
"""
    save_rollouts(path, [rollout])
    arguments = [str(path), str(path.with_name("small")), str(path.with_name("large"))]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    one_group = 16 * (sets.token_ids.nbytes + sets.logprobs.nbytes)
    assert int(done.stdout) < 20 * one_group, done.stdout


def test_a_missing_extra_is_named(path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from sglang_topp_client import load_rollouts, save_rollouts\n"
        "for call in (lambda: load_rollouts('x'), lambda: save_rollouts(sys.argv[1], [])):\n"
        "    try: call()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'sglang-topp[data]'") == 2
    assert not path.exists()


def test_the_readmes_lines(tmp_path, monkeypatch, capsys, variety):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if "RolloutWriter(" in block)
    monkeypatch.chdir(tmp_path)
    exec(program, {"rollouts": variety})
    assert len(capsys.readouterr().out.splitlines()) == len(variety)
    assert same(load_rollouts("step-0.parquet"), variety)
