"""Metrics: the sidecar's Prometheus counters, gauges, and histograms, in their own registry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from sglang_topp.errors import SglangToppError
from sglang_topp_client import Rollout, Score
from sglang_topp_server.error_responses import http_status

_NAMESPACE = "sglang_topp"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


class SizeHistogram(Collector):
    """A Prometheus histogram that can observe a whole array in one call.

    The sidecar observes one candidate set size per token. The `Histogram` of prometheus_client would need one
    call of `observe` per size.

    Args:
        name: the metric's name.
        documentation: the metric's help text.
        bounds: the buckets' upper bounds, in ascending order.
        registry: the registry that exports the metric.
    """

    def __init__(
        self, name: str, documentation: str, bounds: tuple[int, ...], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0
        registry.register(self)

    def observe(self, values: NDArray[np.int64]) -> None:
        """Count each value in the first bucket whose upper bound is at least the value."""
        buckets = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += int(values.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric family, with cumulative buckets."""
        names = [*(f"{bound}.0" for bound in self._bounds), "+Inf"]
        totals = [float(total) for total in np.cumsum(self._counts)]
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(names, totals, strict=True)), self._sum)
        yield family


class Metrics:
    """The sidecar's metrics.

    In `/metrics`, a metric's name is its attribute's name with the prefix `sglang_topp_`. Counters also have
    the suffix `_total`. One name differs: `candidates` is `sglang_topp_candidates_per_token`.

    Attributes:
        requests: number of requests by outcome: `ok`, `partial` (a stream with failed prompts), `failed`,
            `rejected` (never sent to the engine), `aborted` (the caller disconnected, or left its answer
            unread for `Limits.io_timeout_s` seconds), `slow` (the body took longer than this, and the caller
            got a 408).
        errors: number of error responses and of error messages in streams, by `type` and `status`.
        in_flight: number of samples of requests whose body was read and whose answer is not complete yet.
        held_bytes: bytes of finished samples that are not sent yet.
        request_seconds: seconds from a request's headers to the last byte of its answer. The histogram
            omits requests that the sidecar itself refuses with a 401 or a 429.
        samples: number of finished samples.
        scores: number of scored sequences.
        tokens: number of tokens of samples and scores, by kind: `prompt`, `cached`, `scored`, or
            `completion`. All tokens of a scored sequence count as `prompt`. A cached or scored token is
            counted twice: once as `cached` or `scored`, and once as `prompt`.
        candidates: sizes of candidate sets, one per generated or scored token.
        engine_ready: 1 while the engine is ready to generate and to return candidate sets, otherwise 0.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=registry)
        self.requests = counter("requests", "Requests by outcome", ["outcome"])
        self.errors = counter("errors", "Errors by type and status", ["type", "status"])
        self.in_flight = gauge("in_flight", "Samples in flight")
        self.held_bytes = gauge("held_bytes", "Bytes that wait for their callers")
        self.request_seconds = Histogram(
            f"{_NAMESPACE}_request_seconds",
            "Seconds from headers to last byte",
            buckets=_SECONDS,
            registry=registry,
        )
        self.samples = counter("samples", "Finished samples")
        self.scores = counter("scores", "Scored sequences")
        self.tokens = counter("tokens", "Tokens of finished samples", ["kind"])
        self.candidates = SizeHistogram(
            f"{_NAMESPACE}_candidates_per_token", "Candidate set sizes", _SIZES, registry
        )
        self.engine_ready = gauge("engine_ready", "Whether the engine answers and is patched")

    def count_sample(self, sample: Rollout | Score) -> None:
        """Count one finished sample or one score."""
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
        """Count one error that a caller receives."""
        self.errors.labels(type(error).__name__, str(http_status(error))).inc()
