"""Start, supervise, and stop the sidecar's uvicorn server and the engine's process tree."""
