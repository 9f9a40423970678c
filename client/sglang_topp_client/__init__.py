"""Clients that return rollouts with their candidate sets."""

from sglang_topp_client.client import AsyncRolloutClient, RolloutClient
from sglang_topp_client.rollout import Rollout

__all__ = ["AsyncRolloutClient", "Rollout", "RolloutClient"]
