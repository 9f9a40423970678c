"""Support several SGLang releases: list and check the functions that hooks use, and adapt to each release."""
