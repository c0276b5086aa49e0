"""Static batches: the next batch starts when the longest caption of this one has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from scripts.benchmark.workload import Outcome, Workload


class StaticBatches:
    """Batches of one size in job order, or in the order of caption lengths, by any `generate`.

    No job knows its captions' lengths beforehand: the sorted order is the best that sorting by
    any guess could do.
    """

    def __init__(
        self,
        name: str,
        generate: Callable[[Workload], dict[int, tuple[int, ...]]],
        batch_size: int,
        *,
        is_sorted: bool = False,
        runs_to_maximum: bool = False,
    ) -> None:
        self.name = name
        self._generate = generate
        self._batch_size = batch_size
        self._is_sorted = is_sorted
        self._runs_to_maximum = runs_to_maximum

    def run(self, workload: Workload) -> Outcome:
        """Caption batch after batch."""
        order = list(range(len(workload)))
        if self._is_sorted:
            order.sort(key=workload.lengths.__getitem__)
        tokens: dict[int, tuple[int, ...]] = {}
        began = time.perf_counter()
        busy = steps = padding = columns = 0
        for start in range(0, len(order), self._batch_size):
            batch = workload.pick(order[start : start + self._batch_size])
            tokens |= self._generate(batch)
            busy += batch.num_tokens
            longest = batch.max_new_tokens if self._runs_to_maximum else max(batch.lengths)
            steps += longest * len(batch)
            lengths = [len(request.prompt_ids) for request in batch.requests]
            padding += max(lengths) * len(lengths) - sum(lengths)
            columns += max(lengths) * len(lengths)
        seconds = time.perf_counter() - began
        return Outcome(tokens, seconds, {"padding": padding / columns, "slots_busy": busy / steps})

    def close(self) -> None:
        """Hold nothing of its own."""
