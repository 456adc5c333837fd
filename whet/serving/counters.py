# SPDX-License-Identifier: Apache-2.0
"""The numbers of a server since its start, for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from whet.rollout.protocol import Status

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Counters:
    """Counters, histograms and what the engine says of itself."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        named: Any = {"namespace": "whet", "registry": self._registry}
        times = {**named, "buckets": BOUNDS}
        by_status = "Requests by path and HTTP status; 499: the client left."
        self.requests = Counter("requests", by_status, ["path", "status"], **named)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **named)
        self.completion_tokens = Counter("completion_tokens", "Sampled tokens that were sent.", **named)
        streamed = "Time to the first token of requests that stream."
        self.first_token = Histogram("time_to_first_token_seconds", streamed, **times)
        self.whole_request = Histogram("request_seconds", "Time of whole requests that were answered.", **times)
        self._status = {
            "running": Gauge("samples_running", "Samples that are being decoded.", **named),
            "waiting": Gauge("samples_waiting", "Samples that wait in the engine.", **named),
            "oldest_seconds": Gauge("oldest_sample_seconds", "Age of the oldest sample.", **named),
            "version": Gauge("weights_version", "Version of the weights; of a run its checkpoint's step.", **named),
        }

    def page(self, status: Status) -> bytes:
        """The page of /metrics."""
        for name, gauge in self._status.items():
            gauge.set(getattr(status, name))
        return generate_latest(self._registry)
