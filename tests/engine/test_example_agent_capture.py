"""The example that records agents, on the real engine, with the unmodified OpenAI SDK as the agent."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.lib.streaming.chat import ChatCompletionStreamState
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import make_trained_model, simple_english
from sglang_topp_client import Rollout
from sglang_topp_patches.releases import Feature
from tests.engine.conftest import EXAMPLES
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import skip_without

skip_without(Feature.RESUMED)

SAMPLING = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 1000}
END = "<|endoftext|>"
# As Qwen's: a newline after the stop token, and reasoning that may be dropped.
TEMPLATE = """
{%- for one in messages %}{{ one.role }}
{% if one.reasoning_content and not drops_reasoning %}<think>
{{ one.reasoning_content }}
</think>

{% endif %}{{ one.content }}{% for call in one.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
SUM, STORY = "3 plus 4?", "Tell me a story."
# The model's own form of a call: the template adds a space after the colon.
CALL = '<think>\nAdd.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":3}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent-model")
    end = "<|endoftext|>\n"
    calls = f"user\n{SUM}{end}assistant\n{CALL}{end}tool\n7{end}assistant\n7.{end}"
    stories = [f"user\n{STORY}{end}assistant\n{text}{end}" for text in simple_english(100)]
    make_trained_model(folder, [calls, *stories], steps=100)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # learns the call by heart
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for story in stories * 2:
        for text in (calls, story):
            ids = tokenizer(text, return_tensors="pt").input_ids
            model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    parsers = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
    with run_engine(model_path, log_folder / "agents.log", *parsers) as running:
        yield running


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("agent_capture")


@pytest.fixture(scope="module")
def capture(example: ModuleType, engine: Engine) -> Any:
    return example.AgentCapture(engine.url, SAMPLING)


@pytest.fixture(scope="module")
def url(example: ModuleType, capture: Any) -> Iterator[str]:
    with example.serve_app(capture.app) as base_url:
        yield f"{base_url}/v1"


_episodes = map(str, itertools.count())


class Agent:
    """An agent's view: its messages, and the tokens that it paid for."""

    def __init__(self, url: str, capture: Any, model_path: Path) -> None:
        self.episode = next(_episodes)
        self.client = openai.OpenAI(base_url=url, api_key=self.episode, max_retries=0)
        self.num_tokens = 0
        self._capture, self._model_path = capture, model_path

    def call(self, messages: list[Any], **options: Any) -> Any:
        """Return the answer's message, and count its tokens."""
        answer = self.client.chat.completions.create(model="default", messages=messages, **options)
        assert answer.usage is not None
        self.num_tokens += answer.usage.completion_tokens
        (choice,) = answer.choices
        return choice.message

    def finish(self) -> list[Rollout]:
        """Return the rollouts, checked: they hold each answer's tokens once, and a trainer's ratios are 1."""
        rollouts: list[Rollout] = self._capture.finish(self.episode)
        assert sum(int(one.loss_mask.sum()) for one in rollouts) == self.num_tokens
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch.float64).eval()
        for rollout in rollouts:
            errors = np.abs(ratios(model, rollout) - 1)
            assert np.quantile(errors, 0.9) < 1e-5
            assert errors.max() < 1e-4  # float32 in the engine: 1.2e-5 is the largest of 10,000 tokens
        return rollouts


@torch.no_grad()
def ratios(model: Any, rollout: Rollout) -> np.ndarray:
    """Return the importance ratio of each generated token over its candidate set."""
    ids, start = np.concatenate([rollout.prompt_ids, rollout.output_ids]), len(rollout.prompt_ids)
    scores = torch.log_softmax(model(torch.from_numpy(ids[None]).long()).logits[0].double(), -1).numpy()
    assert rollout.candidates is not None
    found = []
    for t in np.flatnonzero(rollout.loss_mask):
        new, (token_ids, _) = scores[start + t - 1], rollout.candidates[t]
        found.append(new[ids[start + t]] - np.log(np.exp(new[token_ids]).sum()) - rollout.masked_logprobs[t])
    return np.exp(found)


@pytest.fixture
def agent(url: str, capture: Any, model_path: Path) -> Iterator[Agent]:
    agent = Agent(url, capture, model_path)
    yield agent
    agent.client.close()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def turns(rollout: Rollout) -> int:
    return len(rollout.appended_spans) + 1


def test_turns_a_subagent_a_retry_and_a_compaction(agent: Agent, model_path: Path) -> None:
    chat: list[Any] = [user(STORY)]
    chat.append(agent.call(chat))
    chat.append(user("Go on."))
    agent.call(chat)  # its answer gets lost: the retry is a rollout of its own
    chat.append(agent.call(chat))

    sub: list[Any] = [{"role": "system", "content": "You write stories."}, user(STORY)]
    sub.append(agent.call(sub))
    chat.append(user("And then?"))
    chat.append(agent.call(chat))
    sub.append(user("Longer."))
    sub.append(agent.call(sub))

    chat = [user(f"So far: {chat[1].content}"), chat[-1], user("And then?")]  # compacted
    chat.append(agent.call(chat))
    chat.append(user("How does it end?"))
    chat.append(agent.call(chat))

    rollouts = agent.finish()
    assert sorted(map(turns, rollouts)) == [2, 2, 2, 2]
    # The template would render each rollout's conversation as the ids do, up to white space.
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    texts = ["".join(tokenizer.decode([*one.prompt_ids, *one.output_ids]).split()) for one in rollouts]
    for messages in (chat, sub):
        plain = [
            one if isinstance(one, dict) else {"role": one.role, "content": one.content} for one in messages
        ]
        text = "".join(tokenizer.apply_chat_template(plain, tokenize=False).split())
        assert text.removesuffix(END) in [one.removesuffix(END) for one in texts]  # the last may be cut


def test_a_tool_call_is_parsed_and_continued(agent: Agent, model_path: Path) -> None:
    chat: list[Any] = [user(SUM)]
    chat.append(agent.call(chat, tools=TOOLS, top_p=0.1, stop="never written"))
    (called,) = chat[-1].tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 3})
    assert (chat[-1].content, chat[-1].reasoning_content.strip()) == ("", "Add.")
    chat.append({"role": "tool", "tool_call_id": called.id, "content": "7"})
    assert agent.call(chat, tools=TOOLS, top_p=0.1).content == "7."
    (rollout,) = agent.finish()
    assert turns(rollout) == 2
    ((start, end),) = rollout.appended_spans
    appended = AutoTokenizer.from_pretrained(model_path).decode(rollout.output_ids[start:end])
    assert appended == "\ntool\n7<|endoftext|>\nassistant\n"  # from the newline after the stop token on
    assert rollout.sampling_params["stop"] is None  # of the last call, not of the first


@pytest.mark.parametrize("kind", ["by the template", "by the agent", "by nobody"])
def test_dropped_reasoning_begins_a_rollout(agent: Agent, engine: Engine, kind: str) -> None:
    extra = {"chat_template_kwargs": {"drops_reasoning": True}} if kind == "by the template" else {}
    chat: list[Any] = [user(SUM)]
    answer = agent.call(chat, tools=TOOLS, top_p=0.1, extra_body=extra).model_dump(exclude_none=True)
    assert answer["reasoning_content"]
    if kind == "by the agent":
        del answer["reasoning_content"]
    chat += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "7"}]
    agent.call(chat, tools=TOOLS, top_p=0.1, extra_body=extra)
    rollouts = agent.finish()
    assert [*map(turns, rollouts)] == ([2] if kind == "by nobody" else [1, 1])
    if kind != "by nobody":
        rendered = engine.http.post("/tokenize", json={"messages": chat, "tools": TOOLS, **extra}).json()
        assert rollouts[1].prompt_ids.tolist() == rendered["tokens"]


@pytest.mark.parametrize("change", ["content", "temperature", "earlier message", "stop string"])
def test_what_changes_the_context_or_the_distribution_begins_a_rollout(agent: Agent, change: str) -> None:
    chat: list[Any] = [user(STORY)]
    answer = agent.call(chat, stop="." if change == "stop string" else None).content
    chat.append({"role": "assistant", "content": answer + "!" if change == "content" else answer})
    if change == "earlier message":
        chat[0] = user("Tell me a joke.")
    agent.call([*chat, user("Go on.")], temperature=0.9 if change == "temperature" else 1.0)
    rollouts = agent._capture.finish(agent.episode)  # the ratios of another temperature are not 1
    assert [*map(turns, rollouts)] == [1, 1]
    assert sum(int(one.loss_mask.sum()) for one in rollouts) == agent.num_tokens


def test_of_two_calls_that_continue_one_turn_one_does(agent: Agent) -> None:
    chat: list[Any] = [user(STORY)]
    chat.append(agent.call(chat))
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda text: agent.call([*chat, user(text)]), ("Go on.", "And then?"))]
    assert all(answer.content for answer in answers)
    assert sorted(map(turns, agent.finish())) == [1, 2]


@pytest.mark.parametrize("content", [STORY, SUM])
def test_streams_hold_what_answers_do_and_both_what_sglang_answers(
    agent: Agent, engine: Engine, content: str
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 300, "messages": [user(content)]}
    # SGLang's chat route parses an answer without <think> as reasoning, unless the request has this.
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}} if content == STORY else {}
    options |= {"model": "default"} | ({"tools": TOOLS} if content == SUM else {})
    whole = agent.client.chat.completions.create(**options)
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none") as direct:
        expected = direct.chat.completions.create(**options)
    state = ChatCompletionStreamState()
    for chunk in agent.client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion()

    def fields(answer: Any) -> dict[str, Any]:
        choice = answer.choices[0]
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
        reasoning = getattr(choice.message, "reasoning_content", None)
        numbers = [getattr(answer.usage, f"{name}_tokens") for name in ("prompt", "completion", "total")]
        return {
            "message": (choice.message.role, choice.message.content or "", reasoning, calls),
            "finish_reason": choice.finish_reason,
            "usage": numbers,
        }

    assert fields(whole) == fields(streamed) == fields(expected)
    assert bool(whole.choices[0].message.tool_calls) is (content == SUM)
    assert len(agent._capture.finish(agent.episode)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_client_disconnects_is_aborted_and_can_be_repeated(
    agent: Agent, engine: Engine, stream: bool
) -> None:
    chat: list[Any] = [user(STORY)]
    chat.append(agent.call(chat).model_dump(include={"role", "content"}))
    chat.append(user("Go on."))

    async def num_running() -> int:
        loads = (await http.get("/v1/loads")).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        assert (await http.post("/pause_generation", json={"mode": "in_place"})).status_code == 200
        impatient = agent.client.with_options(timeout=2)
        with pytest.raises(openai.APITimeoutError):
            await asyncio.to_thread(
                impatient.chat.completions.create, model="default", messages=chat, stream=stream
            )
        assert (await http.post("/continue_generation", json={})).status_code == 200
        while await num_running():
            await asyncio.sleep(0.1)
    await asyncio.to_thread(agent.call, chat)
    (rollout,) = agent.finish()
    assert turns(rollout) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2}, "n: got 2, expected 1"),
        ({"logprobs": True}, "logprobs: got True, expected False"),
        ({"presence_penalty": 0.5}, "presence_penalty: got 0.5, expected 0"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice: got 'required'"),
        ({"seed": 7}, "seed: not supported"),
        ({"extra_body": {"top_logprobs_p": 0.9}}, "top_logprobs_p: not supported"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "essages"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_an_error_that_says_so(
    agent: Agent, options: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        agent.client.chat.completions.create(
            **{"model": "default", "messages": [user(STORY)], "stream": stream} | options
        )
    assert words in error.value.message
    assert agent.finish() == []


def test_the_demo(example: ModuleType, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["agent_capture.py", "--url", engine.url])
        assert example.main() == 0
    assert "3 calls became" in capsys.readouterr().out
