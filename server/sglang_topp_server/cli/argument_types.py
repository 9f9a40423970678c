"""Argument types for argparse: ports, counts, seconds, and JSON objects.

Each type is a function that parses an option's text, or raises an error that says what is expected.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["count", "json_object", "port", "seconds"]


def port(text: str) -> int:
    """Parse a port from 0 to 65535."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"got {text}, expected a port from 0 to 65535")
    return value


def count(text: str) -> int:
    """Parse an integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return value


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object such as '{{\"seed\": 1}}'")
    return value
