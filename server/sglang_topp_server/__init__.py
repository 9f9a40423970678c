"""The FastAPI sidecar and the `sglang-topp` command."""

__all__: list[str] = []
