"""The HTML of a rollout in notebooks."""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np

from sglang_topp import CandidateSets
from tests.client import conftest as fakes


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags_of(html):
    parser = Tags()
    parser.feed(html)
    assert parser.open == []
    return parser.tags


def titles_of(html):
    return [unescape(title) for title in re.findall(r'title="([^"]*)"', html)]


def test_a_token_has_its_candidates_on_hover():
    rollout = fakes.sample([5], 0)
    html = rollout._repr_html_()
    assert set(tags_of(html)) == {"div", "b", "pre", "span"}
    titles = titles_of(html)
    assert len(titles) == len(rollout.output_ids)
    for t, title in enumerate(titles):
        ids, logprobs = rollout.candidates[t]
        head, *lines = title.split("\n")
        assert head.startswith(f"position {t}: {len(ids)} candidate")
        expected = [f"{i} {share:.4f}" for i, share in zip(ids.tolist(), np.exp(logprobs), strict=True)]
        assert [line.removesuffix(" ← sampled") for line in lines] == expected
        (sampled,) = [line for line in lines if line.endswith("sampled")]
        assert sampled.split()[0] == str(rollout.output_ids[t])


def test_text_is_escaped():
    html = replace(fakes.sample([5], 0), text="<script>x</script>", finish_reason='"<!--')._repr_html_()
    assert "script" not in tags_of(html)
    assert "&lt;script&gt;" in html


def test_rollouts_of_every_kind():
    one = fakes.sample([5], 0)
    assert "no candidate sets" in replace(one, candidates=None)._repr_html_()
    masked = replace(one, candidates=one.candidates.without_logprobs())._repr_html_()
    assert "kept mass" not in masked
    extended = one.extend([7, 8])._repr_html_()
    assert titles_of(extended)[-1] == "position 4: no set"
    assert "0 tokens" in fakes.without_tokens(one)._repr_html_()


def test_long_rollouts_and_large_sets_have_an_end():
    one = fakes.sample([5], 0, num_tokens=1000)
    html = one._repr_html_()
    assert len(titles_of(html)) == 400
    assert "… 600 more" in html
    ids = np.arange(500, dtype=np.int32)
    sets = CandidateSets(ids, np.full(500, np.log(1 / 500)), [0, 500], [3])
    large = replace(
        one, output_ids=ids[3:4], logprobs=sets.sampled_logprobs, candidates=sets, weight_spans=None
    )
    assert titles_of(large._repr_html_())[0].endswith("\n… 488 more")
