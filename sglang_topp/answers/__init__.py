"""What engines answer with, decoded into arrays: one file per format, and `fields` for what they share.

Numbers in base64 are little-endian: float32 for log-probs, int32 for token ids; the alphabet is the
standard one, with padding. The decoders return arrays, not `CandidateSets`, which calls them.
"""

__all__: list[str] = []
