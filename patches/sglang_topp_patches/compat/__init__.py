"""Support several SGLang releases: list their seams, check them, and adapt to their internals."""
