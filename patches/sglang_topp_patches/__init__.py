"""Patch SGLang so that it returns candidate sets. SGLang loads this package as a plugin."""
