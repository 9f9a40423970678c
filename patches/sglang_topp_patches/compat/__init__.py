"""Support several SGLang releases: list and check the SGLang functions in use, and adapt to each release."""
