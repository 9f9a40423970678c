"""Adapters to SGLang's internals, one module per range of releases.

`compat.releases` maps each release to its adapter class. A class is named for the oldest release that it
serves, and derives from the class of the next newer range.
"""
