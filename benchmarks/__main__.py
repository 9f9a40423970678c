"""Run the named benchmarks, or all benchmarks in this folder.

A benchmark is a module with a function `run()`, which prints tables. After each benchmark, this command
writes the tables to `benchmarks/results/` as JSON, and as pictures if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil

import benchmarks
from benchmarks.harness import plots, result_files
from tests.cpu_platform import request_cpu_platform


def main() -> None:
    names = [
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.ispkg and module.name != "__main__"
    ]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(names)}")
    chosen = parser.parse_args().name or sorted(names)
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no benchmark named {', '.join(unknown)}; choose from {', '.join(names)}")
    request_cpu_platform()
    for name in chosen:
        with result_files.collect_tables() as tables:
            importlib.import_module(f"benchmarks.{name}").run()
        if tables:
            _write_results(name, tables)


def _write_results(name: str, tables: list[result_files.Table]) -> None:
    path = result_files.write(name, tables)
    print(f"\nresults written to {path.name}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures drawn: matplotlib is not installed")
        return
    for picture in plots.draw(path):
        print(f"picture drawn: {picture.name}")


if __name__ == "__main__":
    main()
