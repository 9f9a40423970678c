"""The sidecar's connection to its engine: a client, probes of the engine's status, and request checks."""
