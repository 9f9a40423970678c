"""How a file of rollouts is laid out: Parquet whose row groups can be found without its footer.

Parquet readers go by the footer at the end alone, and pass over what stands between row groups; so it is
theirs as it is. A file that was cut has no footer, so each row group brings a head and a footer of its own::

    b"PAR1"
    frame 0         a head, the pages of row group 0, its own footer: thrift, places as in the file
    frame 1         …
    closing frame   a head, no pages, the footer of all of them: thrift, its length, b"PAR1"

A head is 48 bytes; numbers are little-endian::

    offset  bytes   content
    0       4       b"TPRG"; b"TPRE" of the closing frame
    4       4       uint32 version: 1
    8       8       uint64 number of the row group; of the closing frame, how many there are
    16      8       uint64 rollouts in it; of the closing frame, in the file
    24      8       uint64 bytes of the pages
    32      4       uint32 bytes of the footer
    36      4       uint32 CRC-32 of the pages
    40      4       uint32 CRC-32 of the footer
    44      4       uint32 CRC-32 of the 44 bytes before

No byte is without a check. A row group's own footer has no b"PAR1" behind it: a file cut there must not look
like one of that row group.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from sglang_topp.errors import TruncatedFileError, WireError

__all__ = ["HEAD_BYTES", "MAGIC", "VERSION", "Frame", "check_magic", "check_pages", "head_of", "walk"]

MAGIC = b"PAR1"
VERSION = 1
"""Of the layout and of the columns; it goes up with either."""

_GROUP, _END = b"TPRG", b"TPRE"
_HEAD = struct.Struct("<4sIQQQIII")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Frame:
    """A frame whose head and footer are whole; its pages have not been looked at.

    Attributes:
        number: of the row group, from 0; of the closing frame, how many there are.
        is_closing: whether it is the closing frame.
        num_rollouts: in the row group; of the closing frame, in the file.
        start: where its pages begin, in bytes from the file's begin.
        num_bytes: of its pages.
        crc: CRC-32 of its pages.
        footer: the footer behind its pages.
    """

    number: int
    is_closing: bool
    num_rollouts: int
    start: int
    num_bytes: int
    crc: int
    footer: bytes

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.start + self.num_bytes + len(self.footer)

    @property
    def name(self) -> str:
        """What errors call it."""
        return "footer" if self.is_closing else f"row group {self.number}"


def head_of(
    number: int, num_rollouts: int, pages: bytes, footer: bytes, *, is_closing: bool = False
) -> bytes:
    """The head of a frame of these parts."""
    head = _HEAD.pack(
        _END if is_closing else _GROUP,
        VERSION,
        number,
        num_rollouts,
        len(pages),
        len(footer),
        zlib.crc32(pages),
        zlib.crc32(footer),
    )
    return head + _CRC.pack(zlib.crc32(head))


def check_magic(file: BinaryIO) -> None:
    """Raise unless the file begins as one of rollouts; TruncatedFileError where it ends before that shows."""
    file.seek(0)
    magic = file.read(len(MAGIC))
    if magic != MAGIC[: len(magic)]:
        raise WireError("file", f"begins with {magic!r}, expected {MAGIC!r}: it is no file of rollouts")
    if len(magic) < len(MAGIC):
        raise TruncatedFileError("row group 0", f"missing: the file has {len(magic)} bytes")


def walk(file: BinaryIO) -> Iterator[Frame]:
    """The frames of a file, the closing one last.

    Raises:
        TruncatedFileError: the file ends before its closing frame does; every frame before was given.
        WireError: a head or a footer was altered, or is of another version; the row group is named.
    """
    check_magic(file)
    at, number, num_rollouts = len(MAGIC), 0, 0
    while True:
        frame = _frame(file, at, number)
        if frame.is_closing:
            _check_end(file, frame, number, num_rollouts)
            yield frame
            return
        yield frame
        at, number, num_rollouts = frame.end, number + 1, num_rollouts + frame.num_rollouts


def check_pages(file: BinaryIO, frame: Frame) -> None:
    """Raise WireError where the pages are not those that were written."""
    file.seek(frame.start)
    crc, left = 0, frame.num_bytes
    while left:
        part = file.read(min(left, _PART_BYTES))
        if not part:
            raise TruncatedFileError(frame.name, f"cut, {left} bytes before the end of its pages")
        crc, left = zlib.crc32(part, crc), left - len(part)
    _check_crc(frame.name, "pages", crc, frame.crc)


def _frame(file: BinaryIO, at: int, number: int) -> Frame:
    file.seek(at)
    raw = file.read(HEAD_BYTES)
    name = f"row group {number}"
    if not raw:
        raise TruncatedFileError(
            "footer",
            f"missing behind {number} row groups that are whole: the file was cut, or its writer not closed",
        )
    # Whatever is there of a head must be of one: a file that was not cut but altered says so.
    if raw[:4] not in (_GROUP[: len(raw)], _END[: len(raw)]):
        raise WireError(
            name,
            f"got {raw[:4]!r} where it begins, expected {_GROUP!r}: the file was altered, or is no file of"
            " rollouts",
        )
    is_closing = raw[:4] == _END
    if len(raw) < HEAD_BYTES:
        raise _cut(name, number, at + len(raw), at + HEAD_BYTES)
    _, version, given, num_rollouts, num_bytes, num_footer, crc, footer_crc = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise WireError(
            name, f"got version {version}, expected {VERSION}; another release of sglang-topp wrote it"
        )
    _check_crc(name, "head", zlib.crc32(raw[: _HEAD.size]), _CRC.unpack_from(raw, _HEAD.size)[0])
    if given != number:
        raise WireError(name, f"got number {given}: row groups are missing, or stand twice")
    start = at + HEAD_BYTES
    size = os.fstat(file.fileno()).st_size
    if size < start + num_bytes + num_footer:
        raise _cut("footer" if is_closing else name, number, size, start + num_bytes + num_footer)
    file.seek(start + num_bytes)
    footer = file.read(num_footer)
    frame = Frame(number, is_closing, num_rollouts, start, num_bytes, crc, footer)
    _check_crc(frame.name, "footer", zlib.crc32(footer), footer_crc)
    return frame


def _check_end(file: BinaryIO, frame: Frame, number: int, num_rollouts: int) -> None:
    if frame.num_rollouts != num_rollouts or frame.num_bytes:
        raise WireError(
            frame.name, f"tells of {frame.num_rollouts} rollouts; the {number} row groups hold {num_rollouts}"
        )
    if (extra := os.fstat(file.fileno()).st_size - frame.end) > 0:
        raise WireError(frame.name, f"got {extra} bytes behind it")


def _cut(name: str, number: int, size: int, expected: int) -> TruncatedFileError:
    return TruncatedFileError(
        name,
        f"the file ends at byte {size}, in the midst of it, expected {expected} or more; {number} row groups"
        " before are whole",
    )


def _check_crc(name: str, part: str, got: int, expected: int) -> None:
    if got != expected:
        raise WireError(name, f"its {part} have the CRC-32 {got:#010x}, expected {expected:#010x}: altered")
