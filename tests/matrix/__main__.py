"""`make matrix`: the engine's tests, the oracles and doctor on every SGLang release, one after the other.

    python -m tests.matrix run [RELEASE ...]      what has no result of the present code yet, or failed
    python -m tests.matrix pin [RELEASE ...]      each release's packages anew, with hashes
    python -m tests.matrix seams [RELEASE ...]    only whether the patch set's seams are in its package
    python -m tests.matrix table                  the README's table, from the results

Every release is left as `releases/RELEASE.json` when it is done. Of a release that has a result, the files of
tests are run that failed, or whose code is another now; remove the result to have all of it run again. What
came out of a run that was ended is in `.matrix/RELEASE.jsonl`, and the next goes on with the files after it.
The exit status is 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_topp_patches.releases import RELEASES as SERVED
from tests.matrix import results
from tests.matrix.environment import JOURNALS, ROOT, environment, pin
from tests.matrix.releases import RELEASES, Release, chosen
from tests.matrix.results import Result
from tests.matrix.seams import problems

REASONS = {release: {str(what): why for what, why in one.refused.items()} for release, one in SERVED.items()}
"""What is not served on a release, and why, as the patch set has it."""

_VERSIONS = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "pin", "seams", "table"))
    parser.add_argument("release", nargs="*", help=f"some of {', '.join(RELEASES)}; those that are served")
    args = parser.parse_args(argv)
    try:
        releases = chosen(args.release)
    except ValueError as error:
        parser.error(str(error))
    if not args.release and args.what != "pin":
        releases = [release for release in releases if release.version in SERVED]
    # What is interrupted removes its environment on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.what == "pin":
        for release in releases:
            pin(release)
            print(f"pinned: {release.lock.relative_to(ROOT)}", flush=True)
        return 0
    if args.what == "seams":
        return _look(releases)
    if args.what == "run":
        for release in releases:
            _run(release)
    print(results.table(results.read(), REASONS))
    versions = [release.version for release in releases]
    found = {result.release: result for result in results.read()}
    return 0 if all(version in found and found[version].is_served for version in versions) else 1


def _look(releases: Sequence[Release]) -> int:
    failed = 0
    for release in releases:
        start = time.monotonic()
        found = problems(release)
        failed += bool(found)
        verdict = "FAILS" if found else "holds"
        print(f"{release.version:<14}{verdict}  in {time.monotonic() - start:.1f} s", flush=True)
        for problem in found:
            print(f"  {problem}")
    return 1 if failed else 0


def _run(release: Release) -> None:
    before = {result.release: result for result in results.read()}.get(release.version)
    codes = results.digests(release)
    journal = JOURNALS / f"{release.version}.jsonl"
    known = {**(before.suites if before and before.doctor else {}), **results.outcomes(journal)}
    kept = {
        path: suite for path, suite in known.items() if codes.get(path) == suite.code and not suite.failures
    }
    left = {path: code for path, code in codes.items() if path not in kept}
    if before is not None and not left and not journal.exists():
        print(f"{release.version}: done, {before.state}", flush=True)
        return
    print(f"{release.version}: installing, Python {release.python}; {len(left)} files to run", flush=True)
    start = time.monotonic()
    with environment(release) as executables, tempfile.TemporaryDirectory() as folder:
        python, torch = json.loads(_output(executables / "python", "-c", _VERSIONS))
        doctor = subprocess.run([executables / "sglang-topp", "doctor"], cwd=folder, env=_environment())
        with journal.open("a") as file:
            file.write(f"\n{json.dumps(left)}\n")  # what was written last may have no end
        words = [word for path in left for word in results.words(release, path)]
        command = [executables / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        command += ["-p", "tests.matrix.journal", "--journal", journal, "--continue-on-collection-errors"]
        # Of a package of the release's, which is compiled as a test imports it.
        command += ["-W", "ignore:invalid escape sequence"]
        ended = _wait(command) if left else 0
    suites = {**kept, **results.outcomes(journal)}
    if ended not in (0, 1) or not codes.keys() <= suites.keys():  # interrupted, or pytest itself failed
        raise SystemExit(f"{release.version}: pytest ended with status {ended}; what came out is kept")
    result = Result(
        release=release.version,
        python=python,
        torch=torch,
        set="whole" if release.whole else "short",
        doctor=doctor.returncode == 0,
        suites={path: suites[path] for path in codes},
        refused=tuple(REASONS.get(release.version, ())),
    )
    results.write(replace(result, commit=_output("git", "rev-parse", "--short=10", "HEAD").strip()))
    journal.unlink()
    minutes = (time.monotonic() - start) / 60
    print(
        f"{release.version}: {result.state}, {result.passed} passed, {len(result.failures)} failed,"
        f" {result.skipped} skipped, {minutes:.0f} minutes",
        flush=True,
    )


def _wait(pytest: Sequence[str | Path]) -> int:
    """Its exit status. Where this process is ended, pytest is told, and ends the engines that it started."""
    # Where a shell started this in the background the signal is ignored, and pytest would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(pytest, cwd=ROOT, env=_environment()) as running:
        try:
            return running.wait()
        except (KeyboardInterrupt, SystemExit) as ending:
            if isinstance(ending, SystemExit):  # a terminal's Ctrl-C has reached pytest too
                running.send_signal(signal.SIGINT)
            running.wait()
            raise


def _environment() -> dict[str, str]:
    """This process's, without what would lead a release's Python to the packages of this one."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_PLUGINS")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _output(*command: str | Path) -> str:
    return subprocess.run(
        command, cwd=ROOT, env=_environment(), check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
