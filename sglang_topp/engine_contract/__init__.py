"""Checks of SGLang requests, shared by the sidecar, the client, and the patch set."""
