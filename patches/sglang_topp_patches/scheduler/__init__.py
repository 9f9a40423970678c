"""Hook SGLang's scheduler processes, which take candidate sets from log-probs."""
