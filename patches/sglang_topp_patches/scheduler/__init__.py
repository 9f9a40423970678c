"""Hooks in SGLang's scheduler processes, which extract candidate sets from log-probs."""
