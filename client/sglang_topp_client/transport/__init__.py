"""HTTP connections, message framing, and the synchronous client's background event loop."""
