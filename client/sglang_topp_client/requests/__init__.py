"""Check a caller's arguments, and build the requests for `generate`, `resume`, and `score`."""
