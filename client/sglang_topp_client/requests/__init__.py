"""Check a caller's arguments and build generate, resume, and score requests, before anything is sent."""
