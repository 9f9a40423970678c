"""Limit the memory that candidate sets use in SGLang's processes, and return freed memory to the OS."""
