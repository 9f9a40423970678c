"""Hooks in SGLang's HTTP process: they check requests and write candidate sets into answers."""
