"""A request changes every metric of the sidecar that it should, as Prometheus's parser reads them."""

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sglang_topp_server.metrics import Metrics, SizeHistogram


def test_one_request_moves_every_counter(sidecar, eventually):
    sidecar.rollouts(["ab", "c"], sampling_params={"n": 2})

    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="ok") == 1)
    assert sidecar.metric("sglang_topp_samples_total") == 4
    assert sidecar.metric("sglang_topp_tokens_total", kind="prompt") == 2 * 2 + 2 * 1
    assert sidecar.metric("sglang_topp_tokens_total", kind="completion") == 4 * 3
    assert sidecar.metric("sglang_topp_tokens_total", kind="cached") == 4
    assert sidecar.metric("sglang_topp_candidates_per_token_count") == 12
    assert sidecar.metric("sglang_topp_candidates_per_token_sum") == 48
    assert sidecar.metric("sglang_topp_candidates_per_token_bucket", le="2.0") == 0
    assert sidecar.metric("sglang_topp_candidates_per_token_bucket", le="4.0") == 12
    assert sidecar.metric("sglang_topp_request_seconds_count") == 1
    assert sidecar.metric("sglang_topp_in_flight") == 0
    assert sidecar.metric("sglang_topp_engine_ready") == 1


def test_metrics_are_in_the_exposition_format(sidecar):
    answer = sidecar.http.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {
        "sglang_topp_in_flight",
        "sglang_topp_candidates_per_token",
        "sglang_topp_request_seconds",
    } <= names


def test_sizes_are_counted_as_prometheus_client_counts_them():
    bounds = (1, 2, 4, 100)
    values = np.array([0, 1, 1, 2, 3, 4, 5, 100, 101, 7000], np.int64)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    sizes = SizeHistogram("x", "doc", bounds, ours)
    sizes.observe(values[:5])
    sizes.observe(values[5:])
    sizes.observe(values[:0])
    expected = Histogram("x", "doc", buckets=bounds, registry=theirs)
    for value in values.tolist():
        expected.observe(value)

    def numbers(registry):
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if not line.startswith("#") and "_created" not in line]

    assert numbers(ours) == numbers(theirs)


def test_every_sidecar_counts_for_itself():
    first, second = Metrics(), Metrics()
    first.samples.inc()
    assert b"sglang_topp_samples_total 0.0" in generate_latest(second.registry)
