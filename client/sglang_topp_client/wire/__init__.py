"""Encode and decode rollouts, scores, and errors, as JSON or as binary frames."""
