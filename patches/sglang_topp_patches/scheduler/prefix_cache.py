"""Give each scored prompt a cache namespace, so that the prompt never reads KV of older weights.

A prompt is scored if its request asks for the candidate sets of prompt positions. A scored prompt must not
read KV that was computed with older weights. A weight push with `flush_cache=false` leaves KV of the older
weights in the prefix cache. After the push, requests in flight insert more KV of the older weights into the
prefix cache. SGLang cannot flush the cache while requests are in flight, so a push with requests in flight
must use `flush_cache=false`.

From a weight push until the next flush of the cache, each scored prompt uses a cache namespace (SGLang's
`extra_key`) for the current weights. Prompts that are scored with the same weights still share cached
prefixes.

With chunked prefill, later chunks of a prompt attend to the KV of earlier chunks. So `prompts`
ends a request with an error if weights are pushed during the prefill of the request's prompt. `weights_of`
identifies the weights that the engine had when a request's prefill began.

This module identifies weights by the number of weight pushes so far, because weight versions are unreliable.
A weight push may have no version. SGLang before 0.5.19 does not tell the scheduler a push's weight version.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.hooks import after, before
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import sets_request

__all__ = ["PrefixCache", "Weights", "outside_kv_problem", "scores_prompt", "weights_of"]

# SGLang's classes of prefix caches that separate namespaces: a request reads KV only from its own namespace.
# The KV in caches of these classes is lost when the scheduler process ends. So these caches never hold KV
# that an earlier process computed, possibly with other weights.
_KEYED_CACHES = frozenset(
    {
        *("UnifiedRadixCache", "RadixCache", "SWARadixCache", "PureSWARadixCache", "MambaRadixCache"),
        *("HiRadixCache", "HiMambaRadixCache", "ChunkCache", "SWAChunkCache", "PureSWAChunkCache"),
    }
)
# Attributes of SGLang's `Scheduler` that are true if the scheduler reads KV from outside its process.
_OUTSIDE = ("enable_hicache_storage", "enable_unified_cache_external_linker")
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER_BEFORE_0_5_13 = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_PUSHES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_WEIGHTS = "sglang_topp_weights"
_EXTRA_KEY = "sglang_topp_extra_key"


@dataclass(frozen=True)
class Weights:
    """The identity of the weights that a forward pass uses.

    Attributes:
        push: the number of weight pushes before the forward pass.
        version: the version of the last weight push; empty if SGLang does not tell the scheduler the version.
    """

    push: int
    version: str


class PrefixCache:
    """A record of the weights that computed the KV in a scheduler's prefix cache.

    Attributes:
        pushes: the number of weight pushes.
        has_only_current_weights: whether all cached KV was computed with the current weights.
    """

    def __init__(self) -> None:
        self.pushes = 0
        # Each namespace's name contains this secret, so callers cannot guess the name. A caller who could
        # guess the name of a future namespace could fill that namespace with KV of the old weights.
        self._secret = secrets.token_hex(16)
        self.has_only_current_weights = True

    @before(*(f"{_UPDATER}.{push}" for push in _PUSHES), since="0.5.13")
    @before(*(f"{_UPDATER}.{end}_weight_update" for end in ("begin", "end")), since="0.5.21")
    @before(*(f"{_UPDATER_BEFORE_0_5_13}.{push}" for push in _PUSHES), until="0.5.13")
    def note_push(self, updater: Any, *args: Any, **kwargs: Any) -> None:
        """Count a weight push.

        The method also counts a push that fails, because a failed push may have changed some weights. Between
        `begin_weight_update` and `end_weight_update`, other processes may write the weights directly (P2P or
        RDMA).
        """
        # Wait for the accelerator, which may still run the last forward pass with the old weights.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.pushes += 1
        self.has_only_current_weights = False

    @after("sglang.srt.managers.scheduler.Scheduler.flush_cache")
    def note_flush(self, is_flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Record that no KV of older weights is cached any more.

        SGLang does not flush the cache while a request holds KV.
        """
        if is_flushed:
            self.has_only_current_weights = True

    def current_weights(self) -> Weights:
        """Identify the weights that SGLang would use if a forward pass began now."""
        return Weights(self.pushes, internals().weight_version())

    @before("sglang.srt.managers.schedule_batch.Req.init_next_round_input")
    def choose_namespace(self, req: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
        """Choose the cache namespace of a scored prompt.

        SGLang passes `tree_cache` when it tries to admit a waiting or retracted request. SGLang then looks up
        a cached prefix in the request's namespace. For the later chunks of a prompt, SGLang omits
        `tree_cache`, and the request keeps its namespace.

        Each scheduler process puts its own random secret into the names of namespaces, so the names differ
        between ranks. All ranks change namespaces at the same weight pushes, so the caches of all ranks hold
        the same prefixes.
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
    """Return the `Weights` that the engine had when the prefill of the request's prompt began.

    The result is None before the prefill. The result is also None for a request whose prompt is not scored.
    """
    return getattr(req, _WEIGHTS, None)


def scores_prompt(req: Any) -> bool:
    """Return whether a request asks for the sets of prompt positions."""
    return bool(sets_request(req).threshold and 0 <= req.logprob_start_len < len(req.origin_input_ids))


def outside_kv_problem(scheduler: Any) -> str:
    """Return why a scored prompt may read KV of weights other than the current ones.

    Return an empty string if cache namespaces prevent such a read (see `PrefixCache.choose_namespace`).
    """
    for name in _OUTSIDE:
        if getattr(scheduler, name, False):
            return f"{name}: KV that is stored outside of the engine may come from other weights"
    cache = scheduler.tree_cache
    # SGLang's cache for streaming sessions wraps another cache. The attribute `inner` is the wrapped cache.
    kind = type(getattr(cache, "inner", cache)).__name__
    if kind not in _KEYED_CACHES:
        return f"the prefix cache {kind} may hold KV of other weights"
    return ""
