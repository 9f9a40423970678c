"""Adapters to SGLang's internals, one module per range of releases.

`compat.releases` maps each release to its adapter class. Each adapter class is named after the oldest release
that it serves, and derives from the adapter of the next newer range.
"""
