"""Rules of SGLang requests that the sidecar, the client, and the patch set share."""
