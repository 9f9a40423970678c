"""Create small models and their tokenizers on disk, for demos and tests without downloads.

    python examples/tiny_model.py FOLDER   # trained on simple English: half a minute on one core

`make_trained_model` learns the sentences of a small grammar: after "The cat sat on the", ten words fit, and
after "What is the capital of France? The answer is", one. `make_tiny_model` is random, and takes a second.
Its text is meaningless, but its next-token distributions are as peaked as those of a real model.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["make_tiny_model", "make_trained_model", "simple_english"]

END_OF_TEXT = "<|endoftext|>"
HIDDEN_SIZE = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    + END_OF_TEXT
    + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

# Each name in angle brackets stands for one of its alternatives. The first ones are the most frequent.
GRAMMAR = {
    "text": [
        "Once upon a time there was a <adjective> <animal> in a <adjective> <place>. <sentences>",
        "<sentence> <sentences>",
        "<fact> <fact> <fact> <fact>",
    ],
    "sentences": ["<sentence> <sentence> <sentence>"],
    "sentence": [
        "The <animal> sat on the <seat>.",
        "The <adjective> <animal> <moved> to the <place>.",
        "Then the <animal> ate some <food>.",
        "The <animal> and the <animal> sang a <adjective> song.",
        "Everyone saw the <adjective> <animal> in the <place>.",
        'One <animal> asked, "Is there any <food> in the <place>?"',
    ],
    "fact": [
        "What is the capital of France? The answer is Paris.",
        "What is the capital of Japan? The answer is Tokyo.",
        "What is the capital of Egypt? The answer is Cairo.",
        "What is the capital of Peru? The answer is Lima.",
        "What is the capital of Kenya? The answer is Nairobi.",
        "What is the capital of Norway? The answer is Oslo.",
        "What is the capital of Italy? The answer is Rome.",
        "What is the capital of Cuba? The answer is Havana.",
    ],
    "animal": ["cat", "dog", "fox", "hen", "mouse", "bear", "owl", "goat", "frog", "duck", "cow", "pig"],
    "adjective": ["little", "big", "old", "happy", "clever", "hungry", "brave", "sleepy", "kind", "lazy"],
    "moved": ["ran", "walked", "went", "came", "hurried", "danced", "jumped", "returned"],
    "seat": ["mat", "floor", "chair", "table", "bed", "roof", "box", "rug", "sofa", "bench"],
    "place": ["garden", "house", "forest", "river", "barn", "field", "hill", "village", "pond", "bridge"],
    "food": ["bread", "cheese", "corn", "soup", "cake", "honey", "apples", "nuts", "berries", "fish"],
}


def make_tiny_model(
    path: str | Path, *, vocab_size: int = 512, logit_std: float = 3.0, seed: int = 0, num_experts: int = 0
) -> Path:
    """Write a loadable model with random weights and a byte-level tokenizer to the folder `path`.

    Args:
        path: the folder to write; it is created if it does not exist.
        vocab_size: number of rows of the LM head, at least 257. The tokenizer uses the token ids 0 to 256.
        logit_std: standard deviation of the logits, in natural-log units. At p = 0.95 and a vocabulary of
            151,936, `logit_std=7` gives candidate sets as large as those of a real model: mean about 20,
            median 15.
        seed: the random seed of the weights.
        num_experts: the number of experts per layer, 2 of which a token is routed to; 0 for a dense model.

    Returns:
        `path`.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(vocab_size, num_experts)
        # The final norm gives hidden states a mean square of 1. The logits of this LM head therefore have a
        # standard deviation of `logit_std`.
        torch.nn.init.normal_(model.lm_head.weight, std=logit_std / HIDDEN_SIZE**0.5)
        for layer in model.model.layers if num_experts else ():
            torch.nn.init.normal_(layer.mlp.gate.weight, std=HIDDEN_SIZE**-0.5)
    model.save_pretrained(path)
    _tokenizer([]).save_pretrained(path)
    return Path(path)


def make_trained_model(
    path: str | Path,
    lines: Sequence[str] = (),
    *,
    hidden_size: int = HIDDEN_SIZE,
    steps: int = 300,
    seed: int = 0,
) -> Path:
    """Train a model on `lines`, and write it to the folder `path` with a tokenizer of the lines' words.

    Args:
        path: the folder to write; it is created if it does not exist.
        lines: the texts to learn; by default, those of `simple_english`. A line ends with the end token.
        hidden_size: the width of the model. The learning rate falls as it grows.
        steps: optimizer steps, each on 32 rows of 64 tokens.
        seed: the random seed of the weights and of the batches.

    Returns:
        `path`.
    """
    import torch

    lines = lines or simple_english(4000)
    tokenizer = _tokenizer(lines)
    encoded = tokenizer([line + END_OF_TEXT for line in lines])["input_ids"]
    width, stream = 64, torch.tensor([token for ids in encoded for token in ids])
    starts = torch.tensor(list(itertools.accumulate(map(len, encoded), initial=0)))
    starts = starts[starts < len(stream) - width]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(len(tokenizer), hidden_size=hidden_size)
        rate = 1e-2 * HIDDEN_SIZE / hidden_size
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            rows = stream[starts[torch.randint(len(starts), (32,))][:, None] + torch.arange(width)]
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def simple_english(count: int, seed: int = 0) -> list[str]:
    """Return random texts of `GRAMMAR`."""
    rng = random.Random(seed)

    def expand(name: str) -> str:
        weights = [1 / (2 + i) for i in range(len(GRAMMAR[name]))]
        return re.sub(r"<(\w+)>", lambda match: expand(match[1]), *rng.choices(GRAMMAR[name], weights))

    return [expand("text") for _ in range(count)]


def _new_model(vocab_size: int, num_experts: int = 0, hidden_size: int = HIDDEN_SIZE) -> Any:
    """Return a Qwen2 model, or with experts a Qwen3-MoE model, with two layers and random float32 weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    model_class, config_class, sizes = Qwen2ForCausalLM, Qwen2Config, {}
    if num_experts:
        model_class, config_class = Qwen3MoeForCausalLM, Qwen3MoeConfig
        sizes = {
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        }
    config = config_class(
        **sizes,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    return model_class(config).float()


def _tokenizer(lines: Sequence[str]) -> Any:
    """Return a byte-level BPE tokenizer, in which each word of `lines` is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # more than all merges
        min_frequency=1,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=4096,  # `/tokenize` of older SGLang cannot send the default, 10**30
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    make_trained_model(sys.argv[1])
