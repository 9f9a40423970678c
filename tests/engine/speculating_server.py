"""Run engines that speculate with the drafts of the test worker, and check their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sglang_topp import CandidateSets, formats
from sglang_topp_patches.releases import Feature, refused
from tests.engine import start_servers
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, run_engine
from tests.speculative import chain_draft_worker

__all__ = ["ASKED", "RULES", "SAMPLING", "run_speculating", "sets_of"]

SAMPLING = {"max_new_tokens": 48, "ignore_eos": True}
ASKED = {"return_logprob": True, "return_logprobs_in_base64": True}
RULES: list[dict[str, Any]] = [{"top_logprobs_p": 0.9}]
"""The fields of a request for sets, one for each source that the release serves."""
if not refused(Feature.SAMPLER_SOURCE):
    RULES.append({"top_logprobs_source": "sampler"})


@contextmanager
def run_speculating(
    model: Path, folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[Engine]:
    """Run a server whose drafts are chains of one to four tokens.

    Args:
        model: the model's folder.
        folder: an empty folder for the server's log, and for its plugin.
        arguments: more arguments of `sglang.launch_server`.
        env: changes to this process's environment.
    """
    arguments, env = (*chain_draft_worker.ARGUMENTS, *arguments), dict(env or {})
    fork_server = start_servers.fork_server
    if fork_server is None or not fork_server.can_fork(arguments, env):  # a forked one knows the algorithm
        env |= chain_draft_worker.install(folder / "plugin")
    with run_engine(model, folder / "speculative.log", *arguments, env=env) as engine:
        yield engine


def sets_of(answer: dict[str, Any]) -> CandidateSets:
    """Return an answer's sets. Check that there is one for each token, with SGLang's own log-probs."""
    reported = answer["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in reported] == answer["output_ids"]
    sets = formats.decode_top_p(answer["meta_info"], answer["output_ids"], vocab_size=VOCAB_SIZE)
    np.testing.assert_array_equal(sets.sampled_logprobs, np.array([each[0] for each in reported], np.float32))
    return sets
