"""Hook SGLang's HTTP process, which checks requests and writes candidate sets into answers."""
