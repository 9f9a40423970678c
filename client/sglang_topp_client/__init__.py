"""The client package: sample rollouts with candidate sets, score sequences, and save and load rollouts.

The package also exports every exception class. The module `sglang_topp.errors` documents the exceptions.
"""

from sglang_topp.errors import (
    AbortedError,
    AuthenticationError,
    BadRequestError,
    InvalidCandidateSetsError,
    InvalidInputError,
    MissingCandidateSetsError,
    OverloadedError,
    PatchError,
    RequestError,
    RequestTimeoutError,
    ResponseError,
    RolloutError,
    SampledTokenMissingError,
    ServerError,
    SglangToppError,
    TransportError,
    WeightPushError,
    WireError,
)
from sglang_topp_client.async_client import AsyncRolloutClient, GenerateOptions, ScoreOptions
from sglang_topp_client.rollout import Rollout, Score
from sglang_topp_client.storage.parquet_files import (
    RolloutWriter,
    ScoredRollout,
    TrainerScores,
    add_trainer_columns,
    load_rollouts,
    load_scored_rollouts,
    save_rollouts,
)
from sglang_topp_client.sync_client import RolloutClient
from sglang_topp_client.weight_push.weight_pusher import WeightPusher

__all__ = [
    "AbortedError",
    "AsyncRolloutClient",
    "AuthenticationError",
    "BadRequestError",
    "GenerateOptions",
    "InvalidCandidateSetsError",
    "InvalidInputError",
    "MissingCandidateSetsError",
    "OverloadedError",
    "PatchError",
    "RequestError",
    "RequestTimeoutError",
    "ResponseError",
    "Rollout",
    "RolloutClient",
    "RolloutError",
    "RolloutWriter",
    "SampledTokenMissingError",
    "Score",
    "ScoreOptions",
    "ScoredRollout",
    "ServerError",
    "SglangToppError",
    "TrainerScores",
    "TransportError",
    "WeightPushError",
    "WeightPusher",
    "WireError",
    "add_trainer_columns",
    "load_rollouts",
    "load_scored_rollouts",
    "save_rollouts",
]
