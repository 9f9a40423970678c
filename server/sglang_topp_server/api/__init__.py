"""The sidecar's HTTP routes: the FastAPI app, key checks, sample endpoints, and response encodings."""
