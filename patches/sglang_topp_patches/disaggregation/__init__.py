"""Carry candidate sets from a prefill server to the decode server that answers the client."""
