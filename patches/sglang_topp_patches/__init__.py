"""Patch SGLang so that it returns candidate sets. The package installs as an SGLang plugin."""
