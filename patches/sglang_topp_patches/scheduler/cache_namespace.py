"""Give scored prompts cache namespaces, so that they never read KV that older weights computed.

A prompt is scored if its request asks for the candidate sets of prompt positions. A scored prompt must not
read KV that older weights computed. But after a weight push with `flush_cache=false`, the prefix cache still
holds KV of the older weights. Requests in flight then add more KV of the older weights. While requests are in
flight, a push must use `flush_cache=false`, because SGLang cannot flush the cache.

So until the cache is flushed, each scored prompt gets a cache namespace (SGLang's `extra_key`) for the
current weights. Prompts that are scored with the same weights still share prefixes.

`weights_of` returns the weights with which a request's prefill began. Later chunks of the prompt attend to
the KV of earlier chunks. If a later pass of the request runs with other weights, `prompt_sets` therefore ends
the request.

This module counts pushes, because weight versions are not reliable. A push may have no version, and the
scheduler of an older SGLang does not receive the version.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.scheduler_messages import THRESHOLD, custom_params

__all__ = ["PrefixCache", "Weights", "outside_kv_problem", "scores_prompt", "weights_of"]

# The prefix caches of SGLang that keep namespaces apart. The KV in these caches is lost when the scheduler's
# process ends.
_KEYED_CACHES = frozenset(
    {
        *("UnifiedRadixCache", "RadixCache", "SWARadixCache", "PureSWARadixCache", "MambaRadixCache"),
        *("HiRadixCache", "HiMambaRadixCache", "ChunkCache", "SWAChunkCache", "PureSWAChunkCache"),
    }
)
# Attributes of SGLang's `Scheduler`. If one of these attributes is set, the scheduler reads KV that is stored
# outside its process.
_OUTSIDE = ("enable_hicache_storage", "enable_unified_cache_external_linker")
_WEIGHTS = "sglang_topp_weights"
_EXTRA_KEY = "sglang_topp_extra_key"


@dataclass(frozen=True)
class Weights:
    """The weights with which a forward pass runs.

    Attributes:
        push: the number of weight pushes before the pass.
        version: the weight version of the last push; empty if the scheduler does not receive it.
    """

    push: int
    version: str


class PrefixCache:
    """Tracks the weights that computed the KV in a scheduler's prefix cache.

    Attributes:
        pushes: the number of weight pushes.
        has_only_current_weights: whether all cached KV was computed with the current weights.
    """

    def __init__(self) -> None:
        self.pushes = 0
        # The secret part of each namespace's name, so that callers cannot guess the name. A caller who could
        # guess the name of a future namespace could fill that namespace with KV of the old weights.
        self._secret = secrets.token_hex(16)
        self.has_only_current_weights = True

    def note_push(self, updater: Any, *args: Any, **kwargs: Any) -> None:
        """Count a weight push: BEFORE hook on the functions that change the weights.

        A push that fails counts too, because it may have changed some weights.
        """
        # Wait for the accelerator, which may still run the last pass with the old weights.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.pushes += 1
        self.has_only_current_weights = False

    def note_flush(self, is_flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Record that no cached KV of older weights is left: AFTER hook on `Scheduler.flush_cache`.

        SGLang does not flush the cache while a request holds KV.
        """
        if is_flushed:
            self.has_only_current_weights = True

    def current_weights(self) -> Weights:
        """Return the weights with which a forward pass runs if SGLang starts the pass now."""
        return Weights(self.pushes, internals().weight_version())

    def choose_namespace(self, req: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
        """Choose the cache namespace of a scored prompt: BEFORE hook on `Req.init_next_round_input`.

        When SGLang tries to admit a waiting or retracted request, it passes `tree_cache`, and then looks up a
        cached prefix in the request's namespace. For a prompt's next chunk, SGLang omits `tree_cache`.

        The name of a namespace contains a random secret of the process, so the names differ between ranks.
        But all ranks change namespaces at the same pushes, so their caches hold the same prefixes.
        """
        if tree_cache is None or not scores_prompt(req):
            return
        setattr(req, _WEIGHTS, self.current_weights())
        if not hasattr(req, _EXTRA_KEY):
            setattr(req, _EXTRA_KEY, req.extra_key)
        given = getattr(req, _EXTRA_KEY)
        req.extra_key = (
            given if self.has_only_current_weights else f"{given or ''}|{self._secret} {self.pushes}"
        )


def weights_of(req: Any) -> Weights | None:
    """Return the weights with which a scored prompt's prefill began, or None if it has not begun."""
    return getattr(req, _WEIGHTS, None)


def scores_prompt(req: Any) -> bool:
    """Return whether a request asks for the sets of prompt positions."""
    return bool(custom_params(req).get(THRESHOLD) and 0 <= req.logprob_start_len < len(req.origin_input_ids))


def outside_kv_problem(scheduler: Any) -> str:
    """Return why a scored prompt may still read KV of other weights, or an empty string."""
    for name in _OUTSIDE:
        if getattr(scheduler, name, False):
            return f"{name}: KV that is stored outside of the engine may come from other weights"
    cache = scheduler.tree_cache
    # Look at the inner cache, because SGLang's cache for streaming sessions wraps another cache.
    kind = type(getattr(cache, "inner", cache)).__name__
    if kind not in _KEYED_CACHES:
        return f"the prefix cache {kind} may hold KV of other weights"
    return ""
