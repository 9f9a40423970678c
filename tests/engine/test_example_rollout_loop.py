"""`examples/rollout_loop.py`: the candidates are the words that fit, and the replayed ratios are 1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from examples.tiny_model import GRAMMAR
from sglang_topp_patches.releases import Feature
from tests.engine.start_servers import with_forks
from tests.skip_missing_features import needs

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout_loop.py"


@needs(Feature.SAMPLER_SOURCE)
def test_the_replayed_ratios_are_one() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), "--samples", "4", "--max-new-tokens", "32"],
        capture_output=True,
        text=True,
        env=with_forks(os.environ),
        timeout=580,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^over the (.*?) {2,}(\S+) +(\S+)%$", ended.stdout, re.MULTILINE)
    ratios = {label: (float(mean), float(off)) for label, mean, off in rows}
    assert ratios["candidate sets"] == (1.0, 0.0)
    # At top-p 0.8, the ratio over the whole vocabulary is the kept mass: the bias that replay removes. In 60
    # runs, the mean was 0.947 with a standard deviation of 0.0014, and 31 % with one of 1.0 % were off.
    mean, off = ratios["whole vocabulary"]
    assert 0.8 <= mean < 0.96
    assert off > 25
    # Several words fit after "The cat sat on the", and one after the question.
    after = {
        prompt: re.findall(r"\[?(\w+) \d\.\d\d", candidates)
        for prompt, candidates in re.findall(r"^(.*) …\n.*\n +\S+  (.*)$", ended.stdout, re.MULTILINE)
    }
    assert set(after["The cat sat on the"]) <= set(GRAMMAR["seat"])
    assert len(after["The cat sat on the"]) >= 5
    assert after["What is the capital of France? The answer is"] == ["Paris"]
    assert ended.stdout.count("[") == 12  # the sampled token of each position, marked
