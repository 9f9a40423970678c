"""Start, supervise, and stop the processes: uvicorn with the sidecar, and the engine's process tree."""
