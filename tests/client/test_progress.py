"""The progress line: who sees it, and what happens if stderr is closed or missing."""

import io
import logging
import sys
from contextlib import closing

import pytest

from sglang_topp_client import AsyncRolloutClient, progress, run
from sglang_topp_client.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("show", "first_s", "stderr", "is_logging", "is_shown"),
    [
        (True, 2.0, Terminal, False, True),
        (True, 2.0, Terminal, True, True),
        (True, 0.0, io.StringIO, False, False),
        (None, 0.0, io.StringIO, False, False),
        (False, 0.0, Terminal, False, False),
        (None, 2.0, Terminal, False, False),
        (None, 0.0, Terminal, False, True),
        (None, 0.0, Terminal, True, False),
    ],
)
async def test_who_sees_it(monkeypatch, engine, show, first_s, stderr, is_logging, is_shown):
    """By default, long batches are shown on a terminal, where the line would mix with a program's log."""
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setattr(run, "FIRST_S", first_s)
    monkeypatch.setattr(logging.getLogger(run.__name__), "hasHandlers", lambda: is_logging)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        await client.generate([5, 6], progress=show)
    assert ("rollouts 1/1" in sys.stderr.getvalue()) == is_shown


def test_a_terminal_sees_the_count(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with closing(Progress(2)) as bar:
        bar.add(10)
        bar.add(10)
    written = sys.stderr.getvalue()
    assert "rollouts 1/2" in written
    assert written.endswith("\n")
    assert written.count("\n") == 1
    assert "rollouts 2/2" in written


class Broken(io.StringIO):
    """A terminal that disappears after some writes."""

    def __init__(self, writes, error):
        super().__init__()
        self.writes, self.error = writes, error

    def isatty(self):
        return True

    def write(self, text):
        if not self.writes:
            raise self.error
        self.writes -= 1
        return super().write(text)


@pytest.mark.parametrize("writes", [0, 1])
@pytest.mark.parametrize("error", [ValueError("I/O on closed file"), BrokenPipeError(), OSError(5, "EIO")])
def test_a_terminal_that_goes_away_costs_no_sample(monkeypatch, writes, error):
    monkeypatch.setattr(sys, "stderr", Broken(writes, error))
    monkeypatch.setattr(progress, "_NEXT_S", 0.0)
    with closing(Progress(3)) as bar:
        for _ in range(3):
            bar.add(10)
    assert sys.stderr.getvalue().count("rollouts") == writes


@pytest.mark.parametrize("stderr", [io.StringIO(), io.TextIOWrapper(io.BytesIO()), object(), None])
async def test_a_closed_stderr_or_none_that_is_a_file(monkeypatch, engine, stderr):
    if isinstance(stderr, io.IOBase):
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        await client.generate([5, 6], progress=True)
