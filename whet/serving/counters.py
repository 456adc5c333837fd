# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from whet.rollout.protocol import Status

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """Numbers of observed times up to each of BOUNDS."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a time."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """The lines of the histogram."""
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Counters:
    """The numbers of a server since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by path and HTTP status; 499: the client left
        self.prompt_tokens = self.completion_tokens = 0
        self.first_token, self.whole_request = Histogram(), Histogram()

    def text(self, status: Status) -> str:
        """The page of /metrics."""
        lines = ["# HELP whet_requests_total Requests by path and HTTP status; 499: the client left."]
        lines.append("# TYPE whet_requests_total counter")
        for (path, code), count in sorted(self.requests.items()):
            lines.append(f'whet_requests_total{{path="{path}",status="{code}"}} {count}')
        for name, kind, meaning, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("completion_tokens_total", "counter", "Sampled tokens that were sent.", self.completion_tokens),
            ("samples_running", "gauge", "Samples that are being decoded.", status.running),
            ("samples_waiting", "gauge", "Samples that wait in the engine.", status.waiting),
            ("oldest_sample_seconds", "gauge", "Age of the oldest sample.", status.oldest_seconds),
            ("weights_version", "gauge", "Version of the weights; of a run its checkpoint's step.", status.version),
        ):
            lines += [f"# HELP whet_{name} {meaning}", f"# TYPE whet_{name} {kind}", f"whet_{name} {value}"]
        for name, meaning, histogram in (
            ("time_to_first_token_seconds", "Time to the first token of requests that stream.", self.first_token),
            ("request_seconds", "Time of whole requests that were answered.", self.whole_request),
        ):
            lines += [f"# HELP whet_{name} {meaning}", f"# TYPE whet_{name} histogram"]
            lines += histogram.lines(f"whet_{name}")
        return "\n".join(lines) + "\n"
