"""Clients that return rollouts with their candidate sets."""

from sglang_topp_client.client import AsyncRolloutClient
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.sync_client import RolloutClient

__all__ = ["AsyncRolloutClient", "Rollout", "RolloutClient"]
