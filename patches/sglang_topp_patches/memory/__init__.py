"""Limit the memory that candidate sets take in SGLang's processes."""
