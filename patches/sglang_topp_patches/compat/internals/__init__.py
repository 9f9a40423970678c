"""Adapters to SGLang's internals, one module per range of releases.

`compat.releases` maps each release to its adapter class. The name of an adapter class contains the oldest
release that the class serves. An adapter class for older releases derives from the class for the releases
directly after them.
"""
