"""What the hooks need of SGLang beside the places where they stand, one module per generation of it.

`releases` says which one a release has, and hands it out.
"""
