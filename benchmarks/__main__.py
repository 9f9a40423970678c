"""Run every benchmark, or those named: each module beside this one that has a `run()`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

import benchmarks


def main() -> None:
    found = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        name = module.name.removeprefix("benchmarks.")
        if name not in ("__main__", "harness", "memory") and not module.ispkg:
            found[name] = module.name
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(found)}")
    chosen = parser.parse_args().name or sorted(found)
    if unknown := sorted(set(chosen) - set(found)):
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    for name in chosen:
        importlib.import_module(found[name]).run()


if __name__ == "__main__":
    main()
