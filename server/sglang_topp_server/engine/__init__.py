"""The engine behind the sidecar: probes of its state, request checks, and the samples that it generates."""
