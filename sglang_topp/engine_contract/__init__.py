"""Checks of SGLang requests, shared by the sidecar, the client, and the plugin."""
