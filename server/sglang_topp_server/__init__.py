"""The FastAPI sidecar and the `sglang-topp` command."""
