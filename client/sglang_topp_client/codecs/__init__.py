"""Encoders and decoders of rollouts, scores, and errors: JSON and binary frames."""
