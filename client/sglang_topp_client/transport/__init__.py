"""The HTTP connections to a server, their settings and limits, and the errors of its answers."""
