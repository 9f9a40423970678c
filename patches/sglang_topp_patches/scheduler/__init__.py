"""Hooks that extract candidate sets from log-probs, in SGLang's scheduler processes."""
