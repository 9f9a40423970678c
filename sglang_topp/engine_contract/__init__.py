"""Rules for requests to SGLang that the sidecar, the client, and the patch set share."""
