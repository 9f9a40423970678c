"""The client package: sample rollouts with candidate sets, score sequences, and save and load rollouts.

The package also exports every exception class. The module `sglang_topp.errors` documents the exceptions.
"""

from sglang_topp import errors
from sglang_topp.errors import *  # noqa: F403  # every error is public here, and its `__all__` names them
from sglang_topp_client.async_client import AsyncRolloutClient, GenerateOptions, ScoreOptions
from sglang_topp_client.requests import (
    OnAbort,
    OnTimeout,
    Prompts,
    SamplingParams,
    Sequences,
    Start,
    TopLogprobsP,
    TopLogprobsSource,
)
from sglang_topp_client.rollout import ReturnField, Rollout, Score, TokenField
from sglang_topp_client.storage.parquet_columns import TrainerScores
from sglang_topp_client.storage.parquet_files import (
    RolloutWriter,
    ScoredRollout,
    add_trainer_columns,
    load_rollouts,
    load_scored_rollouts,
    save_rollouts,
)
from sglang_topp_client.sync_client import RolloutClient
from sglang_topp_client.weight_push.engine_control import PauseMode, Transport
from sglang_topp_client.weight_push.weight_pusher import WeightPusher

__all__ = [
    "AsyncRolloutClient",
    "GenerateOptions",
    "OnAbort",
    "OnTimeout",
    "PauseMode",
    "Prompts",
    "ReturnField",
    "Rollout",
    "RolloutClient",
    "RolloutWriter",
    "SamplingParams",
    "Score",
    "ScoreOptions",
    "ScoredRollout",
    "Sequences",
    "Start",
    "TokenField",
    "TopLogprobsP",
    "TopLogprobsSource",
    "TrainerScores",
    "Transport",
    "WeightPusher",
    "add_trainer_columns",
    "load_rollouts",
    "load_scored_rollouts",
    "save_rollouts",
]
__all__ += errors.__all__
