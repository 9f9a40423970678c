"""`sglang-topp generate`: sample prompts on a running server, and print or save the rollouts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp_server.cli.common import SIDECAR_KEY, Commands, add_command, count, json_object, read_key

if TYPE_CHECKING:
    from sglang_topp_client import Rollout
    from sglang_topp_server.view.token_text import TokenTexts

_PART_SIZE = 32
_MAX_SHOWN = 6
_SAMPLING = (
    ("--temperature", float, "divides the logits"),
    ("--top-p", float, "sample from the smallest set of tokens with this probability"),
    ("--top-k", int, "sample from this many tokens"),
    ("--min-p", float, "sample from tokens with at least this share of the most likely one's probability"),
    ("--max-new-tokens", count, "maximum tokens of one sample"),
    ("--n", count, "samples of each prompt"),
)


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "generate",
        "sample prompts at a server, and print the candidates of each token",
        _run,
        details="The server is a sidecar or a patched SGLang. Its defaults apply to sampling"
        " options that are left out. The key comes from the environment:"
        f" {SIDECAR_KEY} is sent to each --url.",
        examples=[
            "sglang-topp generate --prompt 'Once upon a time' --top-p 0.8 --max-new-tokens 32",
            "sglang-topp generate --prompt Hi --top-logprobs-p 0.9",
            "sglang-topp generate --url http://a:30010 --url http://b:30010 --prompt Hi --n 64 \\",
            "    --top-p 0.9 --out run && sglang-topp view run",
        ],
    )
    parser.add_argument(
        "--url",
        action="append",
        help="a sidecar or a patched SGLang; repeat it for several (http://127.0.0.1:30010)",
    )
    parser.add_argument("--prompt", action="append", required=True, help="a text; repeat it for several")
    parser.add_argument(
        "--top-logprobs-p",
        type=float,
        metavar="P",
        help="candidate sets of this threshold; 0: none (default: the tokens that the sampler could draw)",
    )
    for name, kind, what in _SAMPLING:
        parser.add_argument(name, type=kind, help=what)
    parser.add_argument(
        "--sampling-params", type=json_object, default={}, metavar="JSON", help="SGLang's other parameters"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or a model's directory, for the texts of tokens (the server's model,"
        " if this machine has it)",
    )
    parser.add_argument("--out", metavar="DIRECTORY", help="save the rollouts as they finish, for `view`")


def _run(args: argparse.Namespace) -> int:
    from sglang_topp_client import RolloutClient, RolloutWriter
    from sglang_topp_server.view.token_text import TokenTexts

    urls = args.url or ["http://127.0.0.1:30010"]
    sampling_params = _sampling_params(args)
    sets: dict[str, Any] = {"top_logprobs_source": "sampler"}
    if args.top_logprobs_p is not None:
        sets = {"top_logprobs_p": args.top_logprobs_p}
    # Check the directory and the tokenizer before the server does any work.
    writer = None if args.out is None else RolloutWriter(args.out, part_size=_PART_SIZE)
    texts = None if args.tokenizer is None else TokenTexts(args.tokenizer)
    with RolloutClient(urls[0] if len(urls) == 1 else urls, api_key=read_key(SIDECAR_KEY)) as client:
        if writer is not None:
            num_tokens = 0
            with writer:
                for rollout in client.stream(args.prompt, sampling_params, **sets):
                    writer.write(rollout)
                    num_tokens += len(rollout.output_ids)
            print(f"{args.out}: {writer.num_rollouts:,} rollouts, {num_tokens:,} tokens")
            return 0
        rollouts = client.generate(args.prompt, sampling_params, **sets)
        texts = texts or _server_token_texts(client.server_info(urls[0]), rollouts)
    print("\n\n".join(_table(rollout, texts) for rollout in rollouts))
    if texts is None:
        print("tokens are shown by id; --tokenizer MODEL shows their texts", file=sys.stderr)
    return 0


def _sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    names = (option.removeprefix("--").replace("-", "_") for option, _, _ in _SAMPLING)
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if both := sorted(options.keys() & args.sampling_params.keys()):
        raise InvalidInputError(
            f"--sampling-params: got {both[0]}, which --{both[0].replace('_', '-')} sets too; use one of them"
        )
    return {**args.sampling_params, **options}


def _server_token_texts(info: Mapping[str, Any], rollouts: Sequence[Rollout]) -> TokenTexts | None:
    """Return the token texts of the server's model, if this machine has the model's tokenizer.

    `info` is the result of `RolloutClient.server_info`. The tokenizer must decode the tokens of `rollouts` to
    the texts that the server returned.
    """
    from sglang_topp_server.view.token_text import TokenTexts

    path = info.get("engine", info).get("model_path")
    if not isinstance(path, str) or not Path(path, "tokenizer.json").is_file():
        return None
    try:
        texts = TokenTexts(path)
    except ModuleNotFoundError:
        return None
    return texts if all(map(texts.agrees_with, rollouts)) else None


def _table(rollout: Rollout, texts: TokenTexts | None) -> str:
    """Return a heading, the text, and one row per token with its most likely candidates.

    A model's text is shown as a Python literal, so that it cannot control the terminal.
    """
    facts = [
        f"prompt {rollout.prompt_index}, sample {rollout.sample_index}: {len(rollout.output_ids):,} tokens",
        f"finish reason {rollout.finish_reason}",
    ]
    if rollout.weight_version is not None:
        facts.append(f"weights {rollout.weight_version!r}")
    ids = rollout.output_ids.tolist()
    columns = [
        ["position", *map(str, range(len(ids)))],
        ["token", *(_literal(token_id, texts) for token_id in ids)],
        ["probability", *(f"{probability:.4f}" for probability in np.exp(rollout.logprobs))],
    ]
    if (sets := rollout.candidates) is not None:
        masses = np.exp(sets.log_kept_mass.astype(np.float64))
        if len(sets):
            facts.append(f"mean kept mass {masses.mean():.4f}")
            facts.append(f"candidates per token: mean {sets.sizes.mean():.1f}, largest {sets.sizes.max():,}")
        columns.append(["kept mass", *(f"{mass:.4f}" for mass in masses)])
        columns.append(["candidates", *(_listed(*one, texts) for one in sets)])
    for i, column in enumerate(columns):
        # The columns of words, 1 and 4, begin at the same place in all rows, and numbers end there.
        align = str.ljust if i in (1, 4) else str.rjust
        columns[i] = [align(cell, max(map(len, column))) for cell in column]
    lines = ("  ".join(row).rstrip() for row in zip(*columns, strict=True))
    return "\n".join([", ".join(facts), repr(rollout.text), *lines])


def _listed(token_ids: NDArray[np.int32], logprobs: Any, texts: TokenTexts | None) -> str:
    shown = [
        f"{_literal(token_id, texts)} {np.exp(logprob):.3f}"
        for token_id, logprob in zip(token_ids[:_MAX_SHOWN].tolist(), logprobs, strict=False)
    ]
    if len(token_ids) > _MAX_SHOWN:
        shown.append(f"… {len(token_ids) - _MAX_SHOWN:,} more")
    return "  ".join(shown)


def _literal(token_id: int, texts: TokenTexts | None) -> str:
    text = None if texts is None else texts.text_of(token_id)
    if text is None:
        return str(token_id)
    return repr(bytes(text) if isinstance(text, list) else text)
