"""Memory bounds of the patched processes."""
