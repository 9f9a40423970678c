"""HTTP connections, message framing, and the background event loop of the synchronous client."""
