"""The sidecar (an HTTP server in front of SGLang) and the `sglang-topp` command."""

__all__: list[str] = []
