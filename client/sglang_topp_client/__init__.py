"""Clients that return rollouts and scores with their candidate sets, and files that hold rollouts."""

from sglang_topp_client.client import AsyncRolloutClient
from sglang_topp_client.records import RolloutWriter, load_rollouts, save_rollouts
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.score import Score
from sglang_topp_client.sync_client import RolloutClient

__all__ = [
    "AsyncRolloutClient",
    "Rollout",
    "RolloutClient",
    "RolloutWriter",
    "Score",
    "load_rollouts",
    "save_rollouts",
]
