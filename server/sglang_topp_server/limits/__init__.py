"""Bounds on concurrency, memory, request bodies, and slow peers."""
