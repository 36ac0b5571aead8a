"""Prometheus metrics: the gateway's own, and at scrape the schedulers' counters."""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3mesh.client import Drafts, Inspection
from services.gateway.openai.types import Usage

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_TOKENS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
ACCEPTANCE_BUCKETS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """All families of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = to = CollectorRegistry()
        self.requests = Counter("k3mesh_requests", "Requests by outcome.", ["endpoint", "outcome"], registry=to)
        self.waiting = Gauge("k3mesh_num_requests_waiting", "Answers whose first token has not come.", registry=to)
        self.running = Gauge("k3mesh_num_requests_running", "Answers that are being generated.", registry=to)
        self.first_token = Histogram(
            "k3mesh_time_to_first_token_seconds", "From arrival to the first token.", registry=to, buckets=FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = Histogram(
            "k3mesh_inter_token_latency_seconds", "Between tokens of an answer.", registry=to, buckets=BETWEEN_TOKENS_BUCKETS
        )
        self.whole = Histogram(
            "k3mesh_e2e_request_latency_seconds", "Of finished requests.", ["endpoint"], registry=to, buckets=WHOLE_BUCKETS
        )
        self.prompt_tokens = Counter("k3mesh_prompt_tokens", "Prompt tokens of finished requests.", registry=to)
        self.cache_queries = Counter("k3mesh_prefix_cache_queries", "Prompt tokens looked up in the cache.", registry=to)
        self.cache_hits = Counter("k3mesh_prefix_cache_hits", "Prompt tokens that were not computed.", registry=to)
        self.generation_tokens = Counter("k3mesh_generation_tokens", "Tokens generated.", registry=to)
        self.acceptance_length = Histogram(
            "k3mesh_spec_decode_acceptance_length", "Tokens of a decode round with proposals, mean of an answer.",
            registry=to, buckets=ACCEPTANCE_BUCKETS,
        )  # fmt: skip
        self.draft_windows = Counter("k3mesh_spec_decode_num_drafts", "Windows of proposals verified.", registry=to)
        self.draft_tokens = Counter("k3mesh_spec_decode_num_draft_tokens", "Tokens proposed.", registry=to)
        self.accepted_tokens = Counter("k3mesh_spec_decode_num_accepted_tokens", "Proposals accepted.", registry=to)
        self.accepted_at = Counter(
            "k3mesh_spec_decode_num_accepted_tokens_per_pos", "Proposals accepted by their place in the window, from 0.",
            ["position"], registry=to,
        )  # fmt: skip

    def finished(self, endpoint: str, outcome: str, started: float, usage: Usage) -> None:
        """A request has ended; `outcome` is "finished" or an error's code, `started` of time.monotonic()."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome == "finished":
            self.whole.labels(endpoint).observe(time.monotonic() - started)
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cache_queries.inc(usage.prompt_tokens)
            self.cache_hits.inc(usage.cached_tokens)

    def drafts(self, it: Drafts) -> None:
        """What was drafted for an answer that has ended."""
        self.acceptance_length.observe(it.acceptance_length)
        self.draft_windows.inc(it.windows)
        self.draft_tokens.inc(it.proposed)
        self.accepted_tokens.inc(it.accepted)
        for position, count in enumerate(it.accepted_at):
            self.accepted_at.labels(position).inc(count)

    @contextmanager
    def answer(self, started: float) -> Iterator["AnswerTimes"]:
        """Around one choice of a request that arrived at `started`."""
        times = AnswerTimes(self, started)
        self.waiting.inc()
        try:
            yield times
        finally:
            (self.waiting if times.last is None else self.running).dec()

    def render(self, inspections: Iterable[Inspection]) -> bytes:
        """The text exposition."""
        schedulers = CollectorRegistry()
        schedulers.register(SchedulerCounters(inspections))
        return generate_latest(self.registry) + generate_latest(schedulers)


class AnswerTimes:
    """When the tokens of one choice came."""

    def __init__(self, metrics: Metrics, started: float):
        self._metrics = metrics
        self._started = started
        self.last: float | None = None

    def tokens(self, count: int) -> None:
        """`count` tokens came together: the wait is shared out among them."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc(count)
        if self.last is None:
            self._metrics.first_token.observe(now - self._started)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        else:
            for _ in range(count):
                self._metrics.between_tokens.observe((now - self.last) / count)
        self.last = now


class SchedulerCounters(Collector):
    """What the schedulers said just now, by the names that they use."""

    def __init__(self, inspections: Iterable[Inspection]):
        self._inspections = list(inspections)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        ready = GaugeMetricFamily("k3mesh_scheduler_ready", "1 if the scheduler is ready.", labels=["service", "engine"])
        for seen in self._inspections:
            labels = [seen.service, seen.engine_id]
            ready.add_metric(labels, float(seen.ready))
            for kind, values in ((GaugeMetricFamily, seen.counters), (CounterMetricFamily, seen.totals)):
                for counter, value in values.items():
                    name = f"k3mesh_scheduler_{re.sub('[^a-zA-Z0-9_]', '_', counter)}"
                    if kind is CounterMetricFamily:
                        name += "_total"
                    family = families.setdefault(name, kind(name, f"{counter} of a scheduler.", labels=["service", "engine"]))
                    assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
                    family.add_metric(labels, float(value))
        return [ready, *families.values()]
