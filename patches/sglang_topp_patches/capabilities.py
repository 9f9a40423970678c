"""Compute what a process of an SGLang server can serve, and why not.

Everything that a server refuses as a whole follows from the SGLang release, the hooks that hold, the server's
arguments, and the environment, none of which change while it runs (`Capabilities.prompt_sets` is the
exception). `Capabilities` states it once per process.
`GET /server_info`, `sglang-topp doctor`, and every refusal read it. The functions `request_problem` and
`nucleus_problem` say what a request's own sampling parameters rule out.

SGLang logs and swallows a plugin's exceptions, so `check_seams` and `status` return what is wrong with the
hooks, and the hooks that remain refuse every request for candidate sets.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sglang_topp_patches.hooks import Hook, Seam
from sglang_topp_patches.memory import budget_problem
from sglang_topp_patches.releases import RELEASES, UNLISTED, Feature, installed, internals, refused
from sglang_topp_patches.request import NUCLEUS, SAMPLER, SOURCE

_TRUE = ("1", "true", "yes", "y", "on", "t")

# The sampling backends whose token filters are known exactly, from SGLang's source. SGLang itself records the
# filtered probabilities of these backends, for its own request field `return_sampling_mask`.
_SAMPLING_BACKENDS = ("flashinfer", "pytorch")

# Server arguments whose names begin so may change which tokens are drawn, or how. Any value but the default
# is refused, unless `_CHECKED_ARGUMENTS` has the name. So an argument that a new release adds is refused.
_DRAWING_ARGUMENTS = {
    "speculative_": "accepted drafts may not be drawn from the target's distribution",
    "watermark": "tokens are not drawn from the distribution that is reported",
    "enable_watermark": "tokens are not drawn from the distribution that is reported",
    "dllm": "diffusion decoding does not draw tokens one by one",
}
# These choose and run the draft model, in SGLang 0.5.12 to 0.5.23. Verification draws from the target's
# distribution whatever was drafted. `_speculation_reasons` checks the values of the first two.
_CHECKED_ARGUMENTS = frozenset(
    {
        *("speculative_algorithm", "speculative_use_rejection_sampling"),
        *("speculative_draft_model_path", "speculative_draft_model_revision"),
        *("speculative_draft_load_format", "speculative_draft_model_quantization"),
        *("speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype"),
        *("speculative_draft_window_size", "speculative_draft_sink_size", "speculative_dsa_topk_backend"),
        *("speculative_moe_runner_backend", "speculative_moe_a2a_backend"),
        *("speculative_boundary_reduction", "speculative_skip_dp_mlp_sync"),
        *("speculative_enable_w4a4_mxfp4_megamoe", "speculative_attention_mode"),
        *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        *("speculative_token_map", "speculative_adaptive", "speculative_adaptive_config"),
        *("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth"),
        *("speculative_ngram_match_type", "speculative_ngram_max_trie_depth", "speculative_ngram_capacity"),
        *("speculative_ngram_external_corpus_path", "speculative_ngram_external_sam_budget"),
        "speculative_ngram_external_corpus_max_tokens",
    }
)

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


@dataclass(frozen=True)
class Capabilities:
    """The features that a process can serve, and the reasons against the others.

    Attributes:
        problems: every reason why no request gets sets.
        sampler: why requests with `top_logprobs_source: "sampler"` get none; "" if they do.
        resume: why no answer is resumed (`resumed_tokens`); "" if answers are.
        speculative: why sampled requests get no sets with the server's speculative decoding, which then are
            exact for greedy requests only; "" if sampled requests get sets.
        routes: why no request for sets gets its tokens' experts (`return_routed_experts`); "" if they do.
        scheduler: SGLang's `Scheduler`, in its process.
    """

    problems: tuple[str, ...]
    sampler: str
    resume: str
    speculative: str
    routes: str
    scheduler: Any = None

    @classmethod
    def of(cls, server_args: Any, scheduler: Any = None) -> Capabilities:
        """Compute the capabilities of this process, after SGLang has loaded its plugins.

        Args:
            server_args: SGLang's `ServerArgs`; None if this process has not parsed its command line yet.
            scheduler: SGLang's `Scheduler`, in its process.
        """
        problems = (*status().problems, *_mode_problems(server_args))
        resume = "; ".join(filter(None, (refused(Feature.RESUMED), *problems)))
        sampler, routes = "; ".join(_sampler_problems()), "; ".join(_routes_problems(server_args))
        return cls(problems, sampler, resume, _greedy_only(server_args), routes, scheduler)

    @property
    def sets(self) -> str:
        """Why no request gets sets; "" if requests get sets."""
        return "; ".join(self.problems)

    @property
    def prompt_sets(self) -> str:
        """Why a prompt's positions get no sets; "" if they do, and outside of the scheduler's process.

        A scored prompt must not read KV of other weights, which cache namespaces prevent (see
        `scheduler.requests`). A storage for KV can be attached to a running server, so this is not stored.
        """
        for name in _OUTSIDE:
            if getattr(self.scheduler, name, False):
                return f"{name}: KV that is stored outside of the engine may come from other weights"
        cache = getattr(self.scheduler, "tree_cache", None)
        # SGLang's cache for streaming sessions wraps another cache, its `inner`.
        kind = type(getattr(cache, "inner", cache)).__name__
        if cache is not None and kind not in _KEYED_CACHES:
            return f"the prefix cache {kind} may hold KV of other weights"
        return ""

    @property
    def notes(self) -> list[str]:
        """Which requests for sets are refused although others are served, a sentence each."""
        reasons = {"at a temperature above 0": self.speculative, "for the sets of a prompt": self.prompt_sets}
        return [f"requests {kind} are refused: {reason}" for kind, reason in reasons.items() if reason]


def request_problem(temperature: Any) -> str:
    """Return why this server has no exact sets for a request at this temperature, or an empty string.

    With `SGLANG_RETURN_ORIGINAL_LOGPROB`, SGLang does not divide the logits by the temperature before it
    computes the log-probs. The server then accepts only the temperatures 0 and 1, and requests without a
    temperature. Without `SGLANG_RETURN_ORIGINAL_LOGPROB`, the server accepts every temperature.
    """
    if temperature not in (None, 0, 1) and _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB"):
        return f"temperature: got {temperature!r}, expected 1: {_ORIGINAL_LOGPROB}"
    return ""


def nucleus_problem(temperature: Any, top_k: Any, min_p: Any) -> str:
    """Return why the sampler does not draw from exactly the nucleus of `top_p`, or an empty string.

    This function ignores a temperature that is not a number, because SGLang itself checks the type.
    """
    if isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW:
        return f"temperature: got {temperature!r}, expected more than 0: {_NUCLEUS_ONLY}"
    if top_k not in (None, *_NO_TOP_K):
        return f"top_k: got {top_k!r}, expected -1: {_other_filters()}"
    if min_p:
        return f"min_p: got {min_p!r}, expected 0: {_other_filters()}"
    return ""


_GREEDY_BELOW = 1e-6  # SGLang samples greedily (top_k = 1) at every temperature below this value
_NO_TOP_K = (-1, 1 << 30)  # callers turn top_k off with -1, and SGLang then stores 1 << 30
_NUCLEUS_ONLY = f"{NUCLEUS} returns the nucleus of top_p alone"


def _other_filters() -> str:
    if reason := refused(Feature.SAMPLER_SOURCE):
        return f"{_NUCLEUS_ONLY}, and sets of other filters are not served here: {reason}"
    return f"{_NUCLEUS_ONLY}; {SOURCE} '{SAMPLER}' returns sets of other filters, in its own fields"


_ORIGINAL_LOGPROB = (
    "with SGLANG_RETURN_ORIGINAL_LOGPROB the log-probs are those before temperature, another distribution"
    " than the one that is sampled from"
)


def _sampler_problems() -> tuple[str, ...]:
    """Return the reasons why this server cannot tell which tokens its sampler could draw."""
    if reason := refused(Feature.SAMPLER_SOURCE):
        return (reason,)
    try:
        backend, on_policy = internals().sampling()
    except ValueError as error:  # SGLang's configuration is not set in this process
        return (f"the sampling backend is not known here: {error}",)
    reasons = []
    if backend not in _SAMPLING_BACKENDS:
        reasons.append(
            f"the filters of the sampling backend {backend!r} are not known exactly; those of"
            f" {' and '.join(_SAMPLING_BACKENDS)} are (--sampling-backend)"
        )
    if on_policy:
        reasons.append(
            "with --rl-on-policy-target the reported log-probs are rounded, and not those that are drawn from"
        )
    return tuple(reasons)


def _routes_problems(server_args: Any) -> Iterator[str]:
    """Yield the reasons why SGLang's rows of routed experts may be missing, or those of other tokens."""
    if reason := refused(Feature.ROUTES):
        yield reason

    def value(name: str) -> Any:
        return getattr(server_args, name, None)

    reasons = {
        "the server was started without --enable-return-routed-experts": not value(
            "enable_return_routed_experts"
        ),
        "with --enable-hierarchical-cache, KV that comes back from the host has other tokens' experts": value(
            "enable_hierarchical_cache"
        ),
        "with --pp-size, SGLang returns the experts of one stage": (value("pp_size") or 1) > 1,
        "with --disaggregation-mode, the decode server does not know the prompt's experts": (
            value("disaggregation_mode") not in (None, "null")
        ),
        "with --enable-two-batch-overlap, each half overwrites the other's experts": value(
            "enable_two_batch_overlap"
        ),
        "with --enable-pdmux, prefill and decode overwrite each other's experts": value("enable_pdmux"),
        "with --speculative-algorithm, the experts of accepted drafts are untested": value(
            "speculative_algorithm"
        ),
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def environment_problems() -> tuple[str, ...]:
    """Return every reason why environment variables rule out candidate sets, or an empty tuple."""
    platform = os.environ.get("SGLANG_PLATFORM")
    reasons = {name: reason for name, reason in _ENVIRONMENT.items() if _is_set(name)}
    if not _is_set("SGLANG_USE_PICKLE_IPC", "1"):
        reasons["SGLANG_USE_PICKLE_IPC"] = "a request for sets reaches the scheduler as a Python object"
    if platform not in _PLATFORMS:
        reasons["SGLANG_PLATFORM"] = f"got {platform!r}: {_OTHER_PLATFORM}"
    return tuple(f"{name}: {reason}; unset it" for name, reason in reasons.items())


_PLATFORMS = (None, "", "sglang_topp_cpu")
_OTHER_PLATFORM = (
    "SGLang then loads no plugin of a package that has another platform, as this package has"
    " (sglang_topp_cpu), and finds an accelerator's platform by itself without it"
)


_ENVIRONMENT = {
    "SGLANG_RUST_SERVER": "that HTTP server ignores the field and cannot be patched",
    # If `SGLANG_ENABLE_GRAPH_POOL_BORROW` is on, the next CUDA graph may overwrite tensors before the hooks
    # extract sets from these tensors. In SGLang 0.5.21 to 0.5.23, the tensors hold the logits of prompts. In
    # SGLang 0.5.19, the tensors come from the probabilities in `eagle_sample`, which verifies drafts.
    "SGLANG_ENABLE_GRAPH_POOL_BORROW": (
        "the sets of prompts and of accepted drafts would be in memory that the next CUDA graph may overwrite"
    ),
}


def environment_notes() -> tuple[str, ...]:
    """Return the reasons why environment variables make this server refuse some requests for sets."""
    if _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB"):
        return (f"requests at a temperature other than 1 are refused: {_ORIGINAL_LOGPROB}",)
    return ()


def _mode_problems(server_args: Any) -> tuple[str, ...]:
    """Return every reason why the server arguments or the environment rule out candidate sets."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(server_args, name, default)

    role, algorithm = value("disaggregation_mode"), (value("speculative_algorithm") or "").upper()
    is_split, is_piped = role not in (None, "null"), value("pp_size", 1) > 1
    is_parallel = value("tokenizer_worker_num", 1) > 1
    drafts = f"--speculative-algorithm {algorithm}"
    split = f"disaggregated prefill and decode (--disaggregation-mode {role})"
    used = {
        Feature.PIPELINE: is_piped,
        Feature.DISAGGREGATION: is_split,
        Feature.HTTP_WORKERS: is_parallel,
        Feature.SPECULATIVE: algorithm,
        Feature.REJECTION_SAMPLING: value("speculative_use_rejection_sampling"),
    }
    reasons = {
        **{f"{feature}: {refused(feature)}": used[feature] and refused(feature) for feature in used},
        f"{drafts}: {_OTHER_VERIFICATION.get(algorithm)}": algorithm in _OTHER_VERIFICATION,
        f"{drafts} with SGLANG_SIMULATE_ACC_LEN: SGLang accepts drafts without verifying them": (
            algorithm and _simulates_acceptance()
        ),
        f"{drafts} with --pp-size: this combination is untested": algorithm and is_piped,
        f"{drafts} with --disaggregation-mode: this combination is untested": algorithm and is_split,
        f"{drafts} on this accelerator: its sampling kernel was not checked": (
            algorithm and _has_unknown_kernel()
        ),
        f"{split} with --enable-pd-role-switch: the first token's set would be asked of the wrong role": (
            is_split and value("enable_pd_role_switch")
        ),
        f"{split} with --disaggregation-transfer-backend fake: nothing drew the first token": (
            is_split and value("disaggregation_transfer_backend") == "fake"
        ),
        f"{split} with --pp-size: this combination is untested": is_split and is_piped,
        f"{split} with --tokenizer-worker-num: the first token's set is not kept where it is asked for": (
            role == "prefill" and is_parallel
        ),
    }
    of_mode = (reason for reason, applies in reasons.items() if applies)
    return (*environment_problems(), *_unchecked_arguments(server_args), *of_mode)


def _unchecked_arguments(server_args: Any) -> Iterator[str]:
    """Yield a reason for each argument that may change what is drawn, unless it has its default value."""
    from sglang.srt.server_args import ServerArgs

    for name, parameter in inspect.signature(ServerArgs).parameters.items():
        reason = next((why for prefix, why in _DRAWING_ARGUMENTS.items() if name.startswith(prefix)), "")
        value = getattr(server_args, name, parameter.default)
        if reason and name not in _CHECKED_ARGUMENTS and value != parameter.default:
            option = f"--{name.replace('_', '-')}"
            yield f"{option}: got {value!r}, expected {parameter.default!r}: {reason}"


_OTHER_VERIFICATION = {
    "DFLASH": "it draws by functions of its own, whose probabilities are not captured",
    "DSPARK": "it draws by functions of its own, partly inside of CUDA graphs, and they are not captured",
    "UNO": "SGLang returns no log-probs with it",
}


def _simulates_acceptance() -> bool:
    try:
        return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0
    except ValueError:
        return True


def _has_unknown_kernel() -> bool:
    from sglang.srt.utils import is_musa, is_npu

    return bool(is_npu() or is_musa())


def _greedy_only(server_args: Any) -> str:
    """Return why speculative decoding gives exact sets for greedy requests only, or an empty string."""
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if not algorithm:
        return ""
    from sglang.srt.utils import is_cpu, is_hip, is_xpu

    if not (is_cpu() or is_hip() or is_xpu()):
        return ""
    return (
        f"--speculative-algorithm {algorithm} accepts the most likely tokens on this device, whatever the"
        " temperature, or draws by a kernel that was not checked; only greedy requests have exact sets"
    )


def _is_set(name: str, default: str = "") -> bool:
    """Return whether an environment variable has a value that SGLang reads as true."""
    return os.environ.get(name, default).strip().lower() in _TRUE


# -- the hooks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeamCheck:
    """The result of the check of one seam. `problem` is empty if the seam is as expected."""

    seam: Seam
    problem: str = ""


@dataclass(frozen=True)
class Status:
    """Whether this process can serve candidate sets, and the problems if it cannot.

    Attributes:
        sglang_version: the version of the installed SGLang; empty if SGLang is not installed.
        checks: one `SeamCheck` per seam; empty if SGLang is not installed, or if the installed release is not
            supported.
        problems: every reason why this process refuses requests for sets; empty if the process serves sets.
    """

    sglang_version: str
    checks: tuple[SeamCheck, ...]
    problems: tuple[str, ...]

    @property
    def active(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that `GET /server_info` shows under `sglang_topp`."""
        return {
            "version": version("sglang-topp"),
            "active": self.active,
            # A function with several hooks has one check for each. Problems come last, so that they show.
            "seams": {
                check.seam.target: check.problem or "holds"
                for check in sorted(self.checks, key=lambda check: bool(check.problem))
            },
            "refused": {str(feature): reason for feature, reason in installed()[1].refused.items()},
            "problems": list(self.problems),
        }


def check_seams(seams: Iterable[Seam]) -> Status:
    """Check the seams of the installed SGLang release, whether or not hooks are installed."""
    name, release = installed()
    if not name:
        return Status("", (), ("SGLang is not installed",))
    if release is UNLISTED:
        supported = ", ".join(RELEASES)
        return Status(name, (), (f"SGLang {name} is not supported; supported: {supported}",))
    checks = tuple(SeamCheck(seam, seam.problem()) for seam in seams if seam.is_in(name))
    problems = [f"{check.seam.target}: {check.problem}" for check in checks if check.problem]
    return Status(name, checks, tuple(filter(None, [*problems, _patch_of_slime(), budget_problem()])))


def _patch_of_slime() -> str:
    """Return a message if slime's patch was applied to the installed SGLang, else an empty string.

    slime is a training framework. Its patch of the sampler renormalizes the log-probs of some requests before
    the hooks read them, and changes no signature that is checked. The checks of the signatures have imported
    the sampler's modules.
    """
    for name in ("sampler", "utils.logprob", "logprob_processor"):
        if hasattr(sys.modules.get(f"sglang.srt.layers.{name}"), "renorm_logprob_over_top_p"):
            return (
                f"sglang.srt.layers.{name} has renorm_logprob_over_top_p: this SGLang was changed by slime's"
                " sglang-top_p.patch, and its log-probs are not always those of the whole vocabulary; install"
                " SGLang without that patch file (this plugin answers return_top_p_token_ids itself)"
            )
    return ""


_found: Status | None = None


def remember(found: Status) -> None:
    """Keep the result of the check in `plugin.register`, for `status`."""
    global _found
    _found = found


@functools.cache
def status() -> Status:
    """Return the result of the check in `plugin.register`, and check that its hooks are in place.

    Call this function only after SGLang has loaded its plugins. The result is cached, because every request
    needs it.
    """
    if _found is None:
        problem = (
            "the plugin was not loaded in this process; do SGLANG_PLUGINS and SGLANG_PLATFORM allow it, and"
            " does SGLang's log show an error from it?"
        )
        return Status(installed()[0], (), (problem,))
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched: set[str] = getattr(HookRegistry, "_patched", set())
    hooks = [check.seam for check in _found.checks if isinstance(check.seam, Hook)]
    # If the check finds a problem, the plugin installs only the hooks whose `always` is True.
    idle = {hook.target for hook in hooks if _found.active or hook.always} - patched
    problems = tuple(
        f"{target}: its hook is not in place; does SGLang's log show an error from it?"
        for target in sorted(idle)
    )
    return Status(_found.sglang_version, _found.checks, _found.problems + problems)
