"""The patch set that makes SGLang return candidate sets; installs as an SGLang plugin."""
