"""Row groups: a table as the pages and the footer that stand for it in a file, and back.

pyarrow writes whole files only. So a row group is written as one, to the place in a sparse scratch file that
it is to have in the real one, and what its footer says about places holds there as well.
"""

from __future__ import annotations

import os
import struct
import tempfile
from typing import Any, BinaryIO

from sglang_topp.errors import WireError
from sglang_topp_client.record_columns import pyarrow, schema
from sglang_topp_client.record_frames import MAGIC, VERSION, Frame

__all__ = ["VERSION_KEY", "Footer", "decode", "encode"]

VERSION_KEY = "sglang_topp.rollouts.version"
"""In the Parquet footer's metadata."""

_LENGTH = struct.Struct("<I")
# For what does not grow with the table: its pages' heads and the footer.
_ROOM_BYTES = 1 << 20
# A number in a dictionary may come back as another of the same value (0.0 and -0.0); text may not.
_DICTIONARIES = [
    "top_logprobs_source",
    "finish_reason",
    "weight_version",
    "weight_versions.list.element.version",
]
_STATISTICS = ["prompt_index", "sample_index", "finish_reason", "weight_version"]


class Footer:
    """The footer of a file, as it grows with its row groups."""

    def __init__(self) -> None:
        pa = pyarrow()
        sink = pa.BufferOutputStream()
        _writer(sink).close()
        self._metadata = pa.parquet.read_metadata(pa.BufferReader(sink.getvalue()))

    def add(self, name: str, footer: bytes) -> None:
        """Add the row group, or groups, of one footer of `encode`.

        Raises:
            WireError: its columns are others; `name` says whose they are.
        """
        try:
            self._metadata.append_row_groups(_metadata(footer))
        except RuntimeError as error:
            raise WireError(name, f"its columns are not those of rollouts: {error}") from None

    def to_bytes(self) -> bytes:
        """What stands at the end of a Parquet file."""
        pa = pyarrow()
        sink = pa.BufferOutputStream()
        self._metadata.write_metadata_file(sink)
        return bytes(sink.getvalue())[len(MAGIC) :]


def encode(table: Any, start: int) -> tuple[bytes, bytes]:
    """The pages of a table, and the footer that describes them where they begin at byte `start` of a file.

    Raises:
        OSError: the folder of temporary files has no room for it.
    """
    pa = pyarrow()
    room = 2 * table.nbytes + _ROOM_BYTES
    with tempfile.NamedTemporaryFile() as scratch:
        scratch.truncate(start + room)
        if hasattr(os, "posix_fallocate"):
            # On a full disk this is an error; what is written through a map would be a signal.
            os.posix_fallocate(scratch.fileno(), start, room)
        with pa.memory_map(scratch.name, "r+") as sink:
            with _writer(sink) as writer:
                sink.seek(start)
                writer.write_table(table, row_group_size=max(1, len(table)))
            end = sink.tell()
            sink.seek(start)
            raw = sink.read(end - start)
    tail = _LENGTH.size + len(MAGIC)
    split = len(raw) - tail - _LENGTH.unpack_from(raw, len(raw) - tail)[0]
    return raw[:split], raw[split:-tail]


def decode(file: BinaryIO, frame: Frame) -> Any:
    """The table of a row group.

    Raises:
        WireError: pyarrow cannot read it, or it is of another version.
    """
    pa = pyarrow()
    try:
        metadata = _metadata(frame.footer)
        table = pa.parquet.ParquetFile(file, metadata=metadata, pre_buffer=False).read_row_group(0)
    except (pa.ArrowException, OSError) as error:
        raise WireError(frame.name, f"cannot be read: {error}") from error
    if table.schema != schema() or len(table) != frame.num_rollouts:
        raise WireError(
            frame.name, f"holds {len(table)} rows of {table.schema}, expected {frame.num_rollouts} rollouts"
        )
    return table


def _writer(sink: Any) -> Any:
    writer = pyarrow().parquet.ParquetWriter(
        sink,
        schema(),
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        write_statistics=_STATISTICS,
        write_page_checksum=True,
        # Readers that are told of Arrow's schema would be told nothing that the columns do not say.
        store_schema=False,
    )
    writer.add_key_value_metadata({VERSION_KEY: str(VERSION)})
    return writer


def _metadata(footer: bytes) -> Any:
    pa = pyarrow()
    return pa.parquet.read_metadata(pa.BufferReader(MAGIC + footer + _LENGTH.pack(len(footer)) + MAGIC))
