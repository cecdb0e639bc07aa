# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Prometheus metrics of ``/metrics``, with vLLM's names for metrics of the same meaning."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from megatron.bridge.inference.server.engine_loop import Load

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts of the server.

    Args:
        name: Name of the model.
        load: Returns the engine's load, whose totals only grow.
    """

    def __init__(self, name: str, load: Callable[[], Load]) -> None:
        self._registry = CollectorRegistry()

        def labeled(kind: Any, metric: str, text: str, **options: Any) -> Any:
            metric_object = kind(
                f"vllm:{metric}", text, ["model_name"], registry=self._registry, **options
            )
            return metric_object.labels(name)

        labeled(Gauge, "num_requests_running", "texts that are computed").set_function(
            lambda: load().running
        )
        labeled(Gauge, "num_requests_waiting", "texts that wait").set_function(
            lambda: load().waiting
        )
        labeled(Gauge, "kv_cache_usage_perc", "used part of the caches").set_function(
            lambda: load().caches
        )
        self._load = load
        self._counted = Load()  # what the counters of the engine's totals have
        self._prefix_queries = labeled(
            Counter, "prefix_cache_queries", "tokens of prompts that were looked up in the caches"
        )
        self._prefix_hits = labeled(
            Counter, "prefix_cache_hits", "tokens of prompts that the caches held"
        )
        self._drafted = labeled(
            Counter, "spec_decode_num_draft_tokens", "draft tokens that were computed"
        )
        self._accepted = labeled(
            Counter, "spec_decode_num_accepted_tokens", "draft tokens that became tokens of texts"
        )
        self._prompt = labeled(Counter, "prompt_tokens", "tokens of prompts")
        self._generated = labeled(Counter, "generation_tokens", "generated tokens")
        self._first = labeled(
            Histogram, "time_to_first_token_seconds", "until a text begins", buckets=_SECONDS
        )
        self._between = labeled(
            Histogram, "inter_token_latency_seconds", "from a token to the next", buckets=_SECONDS
        )
        self._whole = labeled(
            Histogram, "e2e_request_latency_seconds", "until a request is over", buckets=_SECONDS
        )
        labels = ["model_name", "finished_reason"]
        self._over = Counter(
            "vllm:request_success", "choices that ended", labels, registry=self._registry
        )
        self._name = name

    def text(self) -> bytes:
        load = self._load()
        self._prefix_queries.inc(load.prefix_queries - self._counted.prefix_queries)
        self._prefix_hits.inc(load.prefix_hits - self._counted.prefix_hits)
        self._drafted.inc(load.drafted - self._counted.drafted)
        self._accepted.inc(load.accepted - self._counted.accepted)
        self._counted = load
        return generate_latest(self._registry)

    def watch(self, prompt_tokens: int) -> "RequestTimes":
        self._prompt.inc(prompt_tokens)
        return RequestTimes(self)

    def ended(self, reason: str) -> None:
        self._over.labels(self._name, reason).inc()


class RequestTimes:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens(self, choice: int, count: int) -> None:
        now = time.perf_counter()
        if choice in self._last:
            self._metrics._between.observe(now - self._last[choice])
        else:
            self._metrics._first.observe(now - self._start)
        self._last[choice] = now
        self._metrics._generated.inc(count)

    def over(self) -> None:
        self._metrics._whole.observe(time.perf_counter() - self._start)
