"""Hooks in SGLang's scheduler processes: they take candidate sets from log-probs."""
