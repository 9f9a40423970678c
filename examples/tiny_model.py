"""Create a small random model (Qwen2, Qwen3-MoE) and its tokenizer, for demos and tests without downloads.

    python examples/tiny_model.py FOLDER

The model's text is meaningless, but its next-token distributions look like those of a real model.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["make_tiny_model"]

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_model(
    path: str | Path, *, vocab_size: int = 512, logit_std: float = 3.0, seed: int = 0, num_experts: int = 0
) -> Path:
    """Write a loadable model and a byte-level tokenizer to the folder `path`.

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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    path = Path(path)
    hidden_size = 64
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
        intermediate_size=128,
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        # The final norm gives hidden states a mean square of 1. The logits of this LM head therefore have a
        # standard deviation of `logit_std`.
        torch.nn.init.normal_(model.lm_head.weight, std=logit_std / hidden_size**0.5)
        for layer in model.model.layers if num_experts else ():
            torch.nn.init.normal_(layer.mlp.gate.weight, std=hidden_size**-0.5)
    model.save_pretrained(path)

    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=4096,  # `/tokenize` of older SGLang cannot send the default, 10**30
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


if __name__ == "__main__":
    make_tiny_model(sys.argv[1])
