"""Adapters to SGLang's internals, one module per range of releases.

`compat.releases` maps each release to its adapter class. The name of an adapter class contains the oldest
release that the class serves. The adapter class for the newest releases is the base class of all other
adapter classes. Each of the other adapter classes derives from the adapter class for the next newer release.
"""
