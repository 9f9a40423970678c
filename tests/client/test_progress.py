"""The progress line: who sees it, and what happens if stderr is closed or missing."""

import io
import logging
import sys
from contextlib import closing

import pytest

from sglang_topp_client import run
from sglang_topp_client.run import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch):
    """Act like a script that does not log, because pytest itself adds handlers."""
    monkeypatch.setattr(logging.getLogger(run.__name__), "hasHandlers", lambda: False)


@pytest.mark.parametrize("show", [None, True, False])
def test_nothing_where_stderr_is_no_terminal(monkeypatch, show):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(run, "_FIRST_PROGRESS_S", 0.0)
    with closing(Progress(2, show)) as bar:
        bar.add(10)
    assert sys.stderr.getvalue() == ""


def test_a_terminal_sees_the_count(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with closing(Progress(2, True)) as bar:
        bar.add(10)
        bar.add(10)
    written = sys.stderr.getvalue()
    assert "rollouts 1/2" in written
    assert written.endswith("\n")
    assert written.count("\n") == 1
    assert "rollouts 2/2" in written


@pytest.mark.parametrize("show", [None, False])
def test_short_batches_and_false_show_nothing(monkeypatch, show):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with closing(Progress(1, show)) as bar:
        bar.add(10)
    assert sys.stderr.getvalue() == ""


def test_by_default_a_long_batch_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(run, "_FIRST_PROGRESS_S", 0.0)
    with closing(Progress(1, None)) as bar:
        bar.add(10)
    assert "rollouts 1/1" in sys.stderr.getvalue()


@pytest.mark.parametrize("show", [None, True])
def test_a_program_that_logs_sees_it_only_if_it_asks(monkeypatch, show):
    """The progress line would mix with log lines on the same terminal. Here the handlers are pytest's."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(run, "_FIRST_PROGRESS_S", 0.0)
    monkeypatch.delattr(logging.getLogger(run.__name__), "hasHandlers")
    with closing(Progress(1, show)) as bar:
        bar.add(10)
    assert ("rollouts 1/1" in sys.stderr.getvalue()) == bool(show)


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
    monkeypatch.setattr(run, "_NEXT_PROGRESS_S", 0.0)
    with closing(Progress(3, True)) as bar:
        for _ in range(3):
            bar.add(10)
    assert sys.stderr.getvalue().count("rollouts") == writes


@pytest.mark.parametrize("stderr", [io.StringIO(), io.TextIOWrapper(io.BytesIO()), object()])
def test_a_closed_stderr_or_none_that_is_a_file(monkeypatch, stderr):
    if isinstance(stderr, io.IOBase):
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    with closing(Progress(1, True)) as bar:
        bar.add(10)


def test_a_process_without_stderr_works(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with closing(Progress(1, True)) as bar:
        bar.add(10)
