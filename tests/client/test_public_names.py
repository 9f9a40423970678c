"""Public names of `sglang_topp_client`, and the packages that it must not import."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import sglang_topp_client
from sglang_topp import errors

PACKAGES = [
    f"sglang_topp_client.{info.name}"
    for info in pkgutil.iter_modules(sglang_topp_client.__path__)
    if info.ispkg
]

PUBLIC_NAMES = [
    *("AsyncRolloutClient", "RolloutClient", "WeightPusher"),
    *("Rollout", "RolloutWriter", "Score", "ScoredRollout", "TrainerScores"),
    *("add_trainer_columns", "load_rollouts", "load_scored_rollouts", "save_rollouts"),
    # Types in signatures.
    *("GenerateOptions", "OnAbort", "OnTimeout", "PauseMode", "Prompts", "SamplingParams", "ScoreOptions"),
    *("Sequences", "Start", "TopLogprobsP", "TopLogprobsSource", "Transport"),
]


def test_public_names_are_pinned():
    assert sorted(sglang_topp_client.__all__) == sorted(PUBLIC_NAMES + errors.__all__)
    assert all(hasattr(sglang_topp_client, name) for name in PUBLIC_NAMES)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_exported_as_the_class_that_is_raised(name):
    assert getattr(sglang_topp_client, name) is getattr(errors, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_subpackages_export_nothing(package):
    assert not hasattr(importlib.import_module(package), "__all__")


def test_import_brings_nothing_beyond_the_base_install():
    code = "import sys, sglang_topp_client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "sglang", "fastapi", "starlette", "uvicorn", "pydantic", "ray", "tqdm", "transformers"}
    heavy |= {"pyarrow", "pandas", "datasets"}
    assert not heavy & set(done.stdout.split())
