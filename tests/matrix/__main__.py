"""`make matrix`: run the engine tests and `sglang-topp doctor` on every supported SGLang release.

    python -m tests.matrix run [RELEASE ...]      run test files that failed or have no current result
    python -m tests.matrix pin [RELEASE ...]      pin the packages of each release again, with hashes
    python -m tests.matrix seams [RELEASE ...]    check the plugin's seams in each release's source
    python -m tests.matrix table                  print the table of docs/reference/releases.md

Releases run one after the other. Each result is written to `releases/RELEASE.json`. A release with a result
reruns only the test files that failed or whose code has changed. Remove the result to rerun all of them.

An interrupted run keeps the outcomes of its finished test files in `.matrix/RELEASE.jsonl`, and the next run
continues after them. The exit status is 1 if a release fails or has no result.
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
from tests.cpu_platform import request_cpu_platform
from tests.matrix import results
from tests.matrix.environment import JOURNALS, ROOT, environment, pin
from tests.matrix.releases import RELEASES, Release, select_releases
from tests.matrix.results import Result
from tests.matrix.seams import find_problems

REASONS = {release: {str(what): why for what, why in one.refused.items()} for release, one in SERVED.items()}
"""For each release, the features that the plugin refuses there, with the reason."""

_VERSIONS = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("run", "pin", "seams", "table"))
    parser.add_argument("release", nargs="*", help=f"some of {', '.join(RELEASES)}; default: all supported")
    args = parser.parse_args(argv)
    try:
        releases = select_releases(args.release)
    except ValueError as error:
        parser.error(str(error))
    if not args.release and args.what != "pin":
        releases = [release for release in releases if release.version in SERVED]
    # Exit by an exception, so that an interrupted run removes its environment.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.what == "pin":
        for release in releases:
            pin(release)
            print(f"pinned: {release.lock.relative_to(ROOT)}", flush=True)
        return 0
    if args.what == "seams":
        return _check_seams(releases)
    if args.what == "run":
        request_cpu_platform()  # SGLang 0.5.12 cannot be imported without an accelerator otherwise
        for release in releases:
            _run(release)
    print(results.format_table(results.read(), REASONS))
    versions = [release.version for release in releases]
    found = {result.release: result for result in results.read()}
    return 0 if all(version in found and found[version].is_served for version in versions) else 1


def _check_seams(releases: Sequence[Release]) -> int:
    failed = 0
    for release in releases:
        start = time.monotonic()
        found = find_problems(release)
        failed += bool(found)
        verdict = "FAILS" if found else "ok"
        print(f"{release.version:<14}{verdict:<5}  in {time.monotonic() - start:.1f} s", flush=True)
        for problem in found:
            print(f"  {problem}")
    return 1 if failed else 0


def _run(release: Release) -> None:
    before = {result.release: result for result in results.read()}.get(release.version)
    digests = results.compute_digests(release)
    journal = JOURNALS / f"{release.version}.jsonl"
    known = {**(before.suites if before and before.doctor else {}), **results.read_journal(journal)}
    kept = {
        path: suite for path, suite in known.items() if digests.get(path) == suite.code and not suite.failures
    }
    left = {path: digest for path, digest in digests.items() if path not in kept}
    if before is not None and not left and not journal.exists():
        print(f"{release.version}: up to date, {before.state}", flush=True)
        return
    print(f"{release.version}: {len(left)} test files to run with Python {release.python}", flush=True)
    start = time.monotonic()
    with environment(release) as executables, tempfile.TemporaryDirectory() as folder:
        python, torch = json.loads(_output(executables / "python", "-c", _VERSIONS))
        doctor = subprocess.run([executables / "sglang-topp", "doctor"], cwd=folder, env=_environment())
        with journal.open("a") as file:
            file.write(f"\n{json.dumps(left)}\n")  # the last line may be incomplete
        arguments = [argument for path in left for argument in results.pytest_arguments(release, path)]
        command = [executables / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        command += [
            "-p",
            "tests.matrix.pytest_journal",
            "--journal",
            journal,
            "--continue-on-collection-errors",
        ]
        # A package of some releases has invalid escape sequences, and Python warns when it compiles them.
        command += ["-W", "ignore:invalid escape sequence"]
        status = _run_pytest(command) if left else 0
    suites = {**kept, **results.read_journal(journal)}
    if status not in (0, 1) or not digests.keys() <= suites.keys():  # interrupted, or pytest itself failed
        raise SystemExit(f"{release.version}: pytest exited with status {status}; finished files are kept")
    result = Result(
        release=release.version,
        python=python,
        torch=torch,
        set="whole" if release.whole else "short",
        doctor=doctor.returncode == 0,
        suites={path: suites[path] for path in digests},
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


def _run_pytest(command: Sequence[str | Path]) -> int:
    """Run pytest and return its exit status.

    If this process is terminated, interrupt pytest, so that its fixtures stop the engines that they started.
    """
    # A shell ignores SIGINT for background jobs, and pytest would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, env=_environment()) as running:
        try:
            return running.wait()
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit):  # Ctrl-C in a terminal reaches pytest anyway
                running.send_signal(signal.SIGINT)
            running.wait()
            raise


def _environment() -> dict[str, str]:
    """Return this process's environment without variables that point to its own packages and plugins."""
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_PLUGINS")
    return {name: value for name, value in os.environ.items() if name not in removed}


def _output(*command: str | Path) -> str:
    return subprocess.run(
        command, cwd=ROOT, env=_environment(), check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
