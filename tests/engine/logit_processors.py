"""Custom logit processors that SGLang's scheduler runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

__all__ = ["NoNumber", "Slow", "num_sampled"]


class NoNumber(CustomLogitProcessor):
    """Sets the logits of position `at` to NaN, and writes each sampled position to the file `seen`.

    Each step after position `slow_after` takes 0.4 s more, so that tests can count steps until an abort on a
    busy machine, too.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            position = len(params["__req__"].output_ids)
            if position == params["at"]:
                logits[row] = float("nan")
            if "seen" in params:
                with open(params["seen"], "a") as seen:
                    seen.write(f"{position}\n")
                if position > params["slow_after"]:
                    time.sleep(0.4)
        return logits


class Slow(CustomLogitProcessor):
    """Changes nothing, and takes 20 ms for each step.

    A request is then still running when a test's next order arrives, however busy the machine is.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        time.sleep(0.02)
        return logits


def num_sampled(seen: Path) -> int:
    """Return how many positions `NoNumber` has written to a file."""
    return 1 + max(map(int, seen.read_text().split()))
