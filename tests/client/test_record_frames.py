"""Every cut and every altered byte of a file, without decoding it: it is whole, or the fault is named."""

import io
import struct
import zlib

import pytest

from sglang_topp.errors import TruncatedFileError, WireError
from sglang_topp_client import RolloutWriter
from sglang_topp_client.record_frames import HEAD_BYTES, check_magic, check_pages, head_of, walk

GROUPS = [2, 1, 3]


@pytest.fixture(scope="module")
def path(fakes_once, tmp_path_factory):
    """A file of three row groups."""
    path = tmp_path_factory.mktemp("frames") / "rollouts.parquet"
    with RolloutWriter(path) as writer:
        for size in GROUPS:
            for index in range(size):
                writer.write(fakes_once.sample([5, 6], index))
            writer.flush()
    return path


@pytest.fixture(scope="module")
def frames(path):
    with open(path, "rb") as file:
        return list(walk(file))


def read(path):
    """How many row groups are whole, and the fault."""
    whole = 0
    try:
        with open(path, "rb") as file:
            for frame in walk(file):
                check_pages(file, frame)
                whole += not frame.is_closing
    except WireError as error:
        return whole, error
    return whole, None


def test_frames_stand_one_behind_the_other(path, frames):
    assert [frame.num_rollouts for frame in frames] == [*GROUPS, sum(GROUPS)]
    assert [frame.number for frame in frames] == [0, 1, 2, 3]
    assert [frame.is_closing for frame in frames] == [False, False, False, True]
    assert [frame.start - HEAD_BYTES for frame in frames] == [4, *(frame.end for frame in frames[:-1])]
    assert frames[-1].end == path.stat().st_size
    assert frames[-1].footer.endswith(b"PAR1")


def test_cut_at_any_byte(path, frames, tmp_path):
    """What ended before the cut is read, and the first that did not is named."""
    raw = path.read_bytes()
    ends = [frame.end for frame in frames[:-1]]
    starts = {4, *ends}
    cut = tmp_path / "cut"
    cut.write_bytes(raw)
    with open(cut, "r+b") as file:
        for size in reversed(range(len(raw))):
            file.truncate(size)
            whole, error = read(cut)
            assert whole == sum(end <= size for end in ends), size
            assert type(error) is TruncatedFileError, size
            if whole < len(ends):
                name = "footer" if size in starts else f"row group {whole}"
                assert error.field == name, size
            else:
                assert error.field in ("footer", "row group 3"), size
            # A reader that knows no frames must not take the rest for a whole file.
            assert size <= 8 or raw[size - 4 : size] != b"PAR1", size


def test_any_altered_byte(path, frames, tmp_path):
    """What stands before it is read, and what it is in is named."""
    raw = path.read_bytes()
    ends = [frame.end for frame in frames]
    changed = tmp_path / "changed"
    changed.write_bytes(raw)
    with open(changed, "r+b", buffering=0) as file:
        for at in range(len(raw)):
            file.seek(at)
            file.write(bytes([raw[at] ^ (1 << at % 8)]))
            whole, error = read(changed)
            file.seek(at)
            file.write(raw[at : at + 1])
            expected = sum(end <= at for end in ends)
            assert whole == expected, at
            names = ["file"] if at < 4 else [f"row group {expected}", "footer"][: 1 + (expected == 3)]
            assert isinstance(error, WireError), at
            assert not isinstance(error, TruncatedFileError), at
            assert error.field in names, (at, error)
    assert read(changed) == (3, None)


def test_row_groups_that_are_gone_or_doubled_are_seen(path, frames, tmp_path):
    raw = path.read_bytes()
    parts = [raw[frame.start - HEAD_BYTES : frame.end] for frame in frames]
    other = tmp_path / "other"
    for order, problem in (
        ([0, 2, 3], "row group 1: got number 2"),
        ([0, 1, 3], "row group 2: got number 3"),
        ([0, 0, 1, 2, 3], "row group 1: got number 0"),
        ([0, 1, 2, 3, 3], "footer: got .* bytes behind it"),
    ):
        other.write_bytes(raw[:4] + b"".join(parts[index] for index in order))
        with pytest.raises(WireError, match=problem):
            raise read(other)[1]


def test_a_closing_frame_of_another_file_is_seen(path, frames, tmp_path):
    raw = path.read_bytes()
    closing = head_of(3, 7, b"", frames[-1].footer, is_closing=True) + frames[-1].footer
    other = tmp_path / "other"
    other.write_bytes(raw[: frames[2].end] + closing)
    with pytest.raises(WireError, match="footer: tells of 7 rollouts; the 3 row groups hold 6"):
        raise read(other)[1]


def test_another_version_is_named(path, tmp_path):
    raw = bytearray(path.read_bytes())
    raw[8:12] = struct.pack("<I", 2)
    raw[48:52] = struct.pack("<I", zlib.crc32(raw[4:48]))
    other = tmp_path / "other"
    other.write_bytes(raw)
    with pytest.raises(WireError, match="row group 0: got version 2, expected 1; another release"):
        raise read(other)[1]


@pytest.mark.parametrize(
    ("raw", "kind", "problem"),
    [
        (b"", TruncatedFileError, "row group 0: missing: the file has 0 bytes"),
        (b"PA", TruncatedFileError, "row group 0: missing: the file has 2 bytes"),
        (b"PK\x03\x04", WireError, "file: begins with b'PK.x03.x04', expected b'PAR1'"),
        (b"{", WireError, "file: begins with b'{'"),
    ],
)
def test_a_file_begins_with_its_magic(raw, kind, problem):
    with pytest.raises(WireError, match=problem) as caught:
        check_magic(io.BytesIO(raw))
    assert type(caught.value) is kind
