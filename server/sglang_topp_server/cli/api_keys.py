"""Read the sidecar's and the engine's API keys from environment variables.

No command takes an API key as an argument, because process lists show command-line arguments.
"""

from __future__ import annotations

import os

from sglang_topp.errors import InvalidInputError
from sglang_topp_server.process.sglang_with_env_key import KEY_VARIABLE as ENGINE_KEY

__all__ = ["ENGINE_KEY", "SIDECAR_KEY", "read_key"]

SIDECAR_KEY = "SGLANG_TOPP_API_KEY"
"""The environment variable that holds the sidecar's API key, which callers must send."""


def read_key(name: str) -> str | None:
    """Return the API key in the environment variable called `name`, or None if the variable is not set.

    Raises:
        InvalidInputError: the key is empty, or begins or ends with white space.
    """
    key = os.environ.get(name)
    if key is not None and not key.strip():
        raise InvalidInputError(f"{name} is set but empty; unset it to require no key")
    if key is not None and key != key.strip():
        raise InvalidInputError(f"{name} begins or ends with white space, which HTTP headers do not carry")
    return key
