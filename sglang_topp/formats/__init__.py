"""Encode and decode candidate sets in the formats of inference engines, and in a packed binary format.

==============  ==================================  ===================================================
format          read with                           written by
==============  ==================================  ===================================================
top_p           decode_top_p                        the patched SGLang, in `meta_info` (encode_top_p)
top_k                                               the patched SGLang, in `meta_info` (encode_top_k)
native_masks    decode_sampling_mask                any SGLang (`return_sampling_mask`); vLLM
packed          unpack, unpack_base64               pack, pack_base64
==============  ==================================  ===================================================

Base64 text uses the standard alphabet, with padding. The encoded numbers are little-endian: log-probs are
float32, and token ids are int32.
"""

from sglang_topp.formats.candidate_sets_binary import pack, pack_base64, unpack, unpack_base64
from sglang_topp.formats.engine_answers import (
    NO_DISTRIBUTION,
    Side,
    decode_sampling_mask,
    decode_top_p,
    encode_top_k,
    encode_top_p,
    has_top_p,
    merge_stream_chunks,
)

__all__ = [
    "NO_DISTRIBUTION",
    "Side",
    "decode_sampling_mask",
    "decode_top_p",
    "encode_top_k",
    "encode_top_p",
    "has_top_p",
    "merge_stream_chunks",
    "pack",
    "pack_base64",
    "unpack",
    "unpack_base64",
]
