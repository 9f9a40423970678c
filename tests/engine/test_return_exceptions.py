"""`return_exceptions=True` on the real engine: a prompt that it refuses leaves the others' samples alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_topp.errors import BadRequestError, ServerError
from sglang_topp_client import Rollout, RolloutClient, Score
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.start_servers import Engine, run_sidecar

P = 0.9
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True, "n": 2}
TOO_LONG = [7] * 5000  # the model's context has 4,096 tokens
PROMPTS = [[1, 2, 3], TOO_LONG, [4, 5]]


@pytest.fixture(scope="module", params=["engine", "sidecar"])
def client(request: pytest.FixtureRequest, engine: Engine) -> Iterator[RolloutClient]:
    if request.param == "engine":
        with RolloutClient(engine.url) as client:
            yield client
    else:
        with run_sidecar(engine.url) as url, RolloutClient(url) as client:
            yield client


def test_a_prompt_that_is_too_long(client: RolloutClient) -> None:
    outcomes = client.generate(PROMPTS, SAMPLING, top_logprobs_p=P, return_exceptions=True)
    assert len(outcomes) == 6
    for i, outcome in enumerate(outcomes):
        if i in (2, 3):
            # A stream of 0.5.12 does not say of every error that the request was wrong.
            assert isinstance(outcome, BadRequestError | ServerError)
        else:
            assert isinstance(outcome, Rollout)
            assert (outcome.prompt_index, outcome.sample_index) == divmod(i, 2)
            assert len(outcome.output_ids) == 8
            check_rollout(outcome, P)


def test_a_sequence_that_is_too_long(client: RolloutClient) -> None:
    outcomes = client.score(PROMPTS, top_logprobs_p=P, return_exceptions=True)
    assert isinstance(outcomes[1], BadRequestError | ServerError)
    for i in (0, 2):
        score = outcomes[i]
        assert isinstance(score, Score)
        assert score.token_ids.tolist() == PROMPTS[i]
        assert score.candidates is not None
