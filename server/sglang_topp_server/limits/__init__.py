"""The sidecar's limits on concurrency, memory, request bodies, and slow callers."""
