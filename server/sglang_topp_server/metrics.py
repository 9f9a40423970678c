"""What the sidecar counts, for Prometheus, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_topp.errors import SglangToppError
from sglang_topp_client import Rollout, Score
from sglang_topp_server.problems import status_of

__all__ = ["Families", "Metrics", "SizeHistogram"]

Families: TypeAlias = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""What one process counts: name, help text and type of each family, and its samples: name, labels, value."""

# Of these the sum over processes says nothing: all are ready where the last one is.
_SMALLEST = ("sglang_topp_engine_ready", "_created")

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


class SizeHistogram(Collector):
    """A histogram that takes whole arrays: prometheus_client's own takes one observation per call,
    and a rollout has one per token.

    Args:
        name: the metric's name.
        documentation: its help text.
        bounds: the buckets' upper bounds, rising.
        registry: where it is shown.
    """

    def __init__(
        self, name: str, documentation: str, bounds: tuple[int, ...], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0
        registry.register(self)

    def observe(self, values: NDArray[np.int64]) -> None:
        """Count each value in the first bucket whose bound it does not exceed."""
        buckets = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += int(values.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The one family, its buckets cumulated as the format asks."""
        names = [*(f"{bound}.0" for bound in self._bounds), "+Inf"]
        totals = [float(total) for total in np.cumsum(self._counts)]
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(names, totals, strict=True)), self._sum)
        yield family


class Metrics:
    """The sidecar's counters; in `/metrics` their names carry the prefix `sglang_topp_`.

    Attributes:
        requests: by outcome: `ok`, `partial` (a stream with failed prompts), `failed`, `rejected` (never
            sent to the engine), `aborted` (the caller hung up), `slow` (the caller's connection was closed,
            because it did not send its body or take its answer at the rate of `limits.py`).
        errors: answers and lines that are errors, by `type` and `status`.
        in_flight: requests between the last byte of their body and that of their answer.
        held_bytes: of finished samples that wait for their callers.
        request_seconds: from a request's headers to the last byte of its answer, whatever that is; not of
            those that get a 401 or a 429.
        samples: finished samples.
        scores: scored sequences.
        tokens: of both, by kind: `prompt` (the whole of a scored sequence), `cached` and `scored` (parts of
            `prompt`), `completion`.
        candidates: sizes of candidate sets, one per generated or scored token.
        engine_ready: 1 while the engine answers and is patched.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sglang_topp_requests", "Requests by outcome", ["outcome"], registry=self.registry
        )
        self.errors = Counter(
            "sglang_topp_errors", "Errors by type and status", ["type", "status"], registry=self.registry
        )
        self.in_flight = Gauge("sglang_topp_in_flight", "Requests in flight", registry=self.registry)
        self.held_bytes = Gauge(
            "sglang_topp_held_bytes", "Bytes that wait for their callers", registry=self.registry
        )
        self.request_seconds = Histogram(
            "sglang_topp_request_seconds",
            "Seconds from headers to last byte",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.samples = Counter("sglang_topp_samples", "Finished samples", registry=self.registry)
        self.scores = Counter("sglang_topp_scores", "Scored sequences", registry=self.registry)
        self.tokens = Counter(
            "sglang_topp_tokens", "Tokens of finished samples", ["kind"], registry=self.registry
        )
        self.candidates = SizeHistogram(
            "sglang_topp_candidates_per_token", "Candidate set sizes", _SIZES, self.registry
        )
        self.engine_ready = Gauge(
            "sglang_topp_engine_ready", "Whether the engine answers and is patched", registry=self.registry
        )

    def count_sample(self, sample: Rollout | Score) -> None:
        """Add one finished sample, or one score."""
        if isinstance(sample, Score):
            self.scores.inc()
            self.tokens.labels("prompt").inc(len(sample.token_ids))
            self.tokens.labels("scored").inc(len(sample.logprobs))
        else:
            self.samples.inc()
            self.tokens.labels("prompt").inc(len(sample.prompt_ids))
            self.tokens.labels("completion").inc(len(sample.output_ids))
        self.tokens.labels("cached").inc(sample.cached_tokens)
        if sample.candidates is not None:
            self.candidates.observe(sample.candidates.sizes)

    def count_error(self, error: SglangToppError) -> None:
        """Add one error that a caller gets to see."""
        self.errors.labels(type(error).__name__, str(status_of(error))).inc()

    def count_refusal(self, error: SglangToppError) -> None:
        """Add one request that is answered without a look at it."""
        self.requests.labels("rejected").inc()
        self.count_error(error)

    def families(self) -> Families:
        """What was counted, for another process."""
        return [
            (
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
            )
            for family in self.registry.collect()
        ]

    def text(self, others: Sequence[Families] = ()) -> bytes:
        """The exposition format, version 0.0.4; of other processes too, all added up."""
        if not others:
            return generate_latest(self.registry)
        added = CollectorRegistry()
        added.register(_Added([self.families(), *others]))
        return generate_latest(added)


class _Added(Collector):
    """What several processes count, added up."""

    def __init__(self, all_families: Sequence[Families]) -> None:
        self._all_families = all_families

    def collect(self) -> Iterator[Metric]:
        """Every family once."""
        metrics: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for families in self._all_families:
            for name, documentation, kind, samples in families:
                metrics.setdefault(name, Metric(name, documentation, kind))
                known = values.setdefault(name, {})
                for sample, labels, value in samples:
                    at = sample, tuple(labels.items())
                    if at in known:
                        value = min(value, known[at]) if sample.endswith(_SMALLEST) else value + known[at]
                    known[at] = value
        for name, metric in metrics.items():
            for (sample, pairs), value in values[name].items():
                metric.add_sample(sample, dict(pairs), value)
            yield metric
