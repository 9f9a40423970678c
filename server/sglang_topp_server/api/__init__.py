"""The sidecar's HTTP routes: the FastAPI app, API-key checks, sample endpoints, and response encodings."""
