"""Run every benchmark, or those named: each module beside this one that has a `run()`.

What each prints is left in `benchmarks/results/` too, as JSON and, where matplotlib is there, as pictures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil

import benchmarks
from benchmarks import plots, results

_TOOLS = ("__main__", "engine_stand_in", "harness", "memory", "plots", "results")


def main() -> None:
    found = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        name = module.name.removeprefix("benchmarks.")
        if name not in _TOOLS and not module.ispkg:
            found[name] = module.name
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(found)}")
    chosen = parser.parse_args().name or sorted(found)
    if unknown := sorted(set(chosen) - set(found)):
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    for name in chosen:
        with results.recorded() as tables:
            importlib.import_module(found[name]).run()
        if tables:
            _leave(name, tables)


def _leave(name: str, tables: list[results.Table]) -> None:
    path = results.write(name, tables)
    print(f"\nwritten: {path.name}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed")
        return
    for picture in plots.draw(path):
        print(f"drawn: {picture.name}")


if __name__ == "__main__":
    main()
