"""`sglang-topp generate`: sample prompts on a running server, and print or save the rollouts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp_server.cli.common import SIDECAR_KEY, add_command, count, json_object, read_key

if TYPE_CHECKING:
    from sglang_topp_client import Rollout

__all__ = ["add_parser"]

_PART_SIZE = 32
_SAMPLING = (
    ("--temperature", float, "divides the logits"),
    ("--top-p", float, "sample from the smallest set of tokens with this probability"),
    ("--top-k", int, "sample from this many tokens"),
    ("--min-p", float, "sample from tokens with at least this share of the most likely one's probability"),
    ("--max-new-tokens", count, "maximum tokens of one sample"),
    ("--n", count, "samples of each prompt"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "generate",
        "sample prompts at a server, and print the candidates of each token",
        details="The server is a sidecar or a patched SGLang. Its defaults apply to sampling"
        " options that are left out.",
        notes=f"The key comes from the environment: {SIDECAR_KEY} is sent to each --url. The table is"
        " colored on terminals, unless NO_COLOR is set.",
        examples=[
            "sglang-topp generate --prompt 'Once upon a time' --top-p 0.8 --max-new-tokens 32",
            "sglang-topp generate --prompt Hi --top-logprobs-p 0.9",
            "sglang-topp generate --prompt Hi --n 4 --top-logprobs-p 0.9 --json | jq .candidates[0]",
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
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object for each rollout as it finishes, with candidates as [token id, log-prob]",
    )
    output.add_argument("--out", metavar="DIRECTORY", help="save the rollouts as they finish, for `view`")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from sglang_topp_client import RolloutClient, RolloutWriter

    urls = args.url or ["http://127.0.0.1:30010"]
    sampling_params = _sampling_params(args)
    sets: dict[str, Any] = {"top_logprobs_source": "sampler"}
    if args.top_logprobs_p is not None:
        sets = {"top_logprobs_p": args.top_logprobs_p}
    # Check the directory, and load the tokenizer below, before the server does any work.
    writer = None if args.out is None else RolloutWriter(args.out, part_size=_PART_SIZE)
    with RolloutClient(urls[0] if len(urls) == 1 else urls, api_key=read_key(SIDECAR_KEY)) as client:
        if args.json:
            for rollout in client.stream(args.prompt, sampling_params, **sets):
                print(json.dumps(_record(rollout), allow_nan=False), flush=True)
            return 0
        if writer is not None:
            num_tokens = 0
            with writer:
                for rollout in client.stream(args.prompt, sampling_params, **sets):
                    writer.write(rollout)
                    num_tokens += len(rollout.output_ids)
            print(f"{args.out}: {writer.num_rollouts:,} rollouts, {num_tokens:,} tokens")
            return 0
        from sglang_topp_server.cli import token_table

        texts = token_table.token_texts(args.tokenizer)
        finished = client.generate(args.prompt, sampling_params, **sets)
        if texts is None:
            texts = token_table.server_token_texts(client.server_info(urls[0]), finished)
        token_table.print_rollouts(finished, texts)
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


def _record(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout's JSON record: arrays become lists instead of base64, and -inf becomes null."""
    from sglang_topp_client.wire.records import to_record

    candidates = None
    if rollout.candidates is not None:
        candidates = [
            [list(pair) for pair in zip(token_ids.tolist(), _finite(logprobs), strict=True)]
            for token_ids, logprobs in rollout.candidates
            if logprobs is not None
        ]
    return to_record(rollout) | {"logprobs": _finite(rollout.logprobs), "candidates": candidates}


def _finite(logprobs: NDArray[np.float32]) -> list[float | None]:
    return [value if value > -np.inf else None for value in logprobs.tolist()]
