"""Static batches: the next batch starts when the longest caption of this one has ended."""

from __future__ import annotations

from collections.abc import Callable

from scripts.benchmark.clock import now
from scripts.benchmark.workload import Outcome, Workload

Generated = tuple[dict[int, tuple[int, ...]], float]


def timed(
    generate: Callable[[Workload], dict[int, tuple[int, ...]]],
) -> Callable[[Workload], Generated]:
    """Measure a `generate` of this process."""

    def measured(batch: Workload) -> Generated:
        began = now()
        tokens = generate(batch)
        return tokens, now() - began

    return measured


class StaticBatches:
    """Batches of one size in job order, or in the order of caption lengths, by any `generate`.

    No job knows its captions' lengths beforehand: the sorted order is the best that sorting by
    any guess could do.
    """

    def __init__(
        self,
        name: str,
        generate: Callable[[Workload], Generated],
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
        seconds = 0.0
        busy = steps = padding = columns = 0
        for start in range(0, len(order), self._batch_size):
            batch = workload.pick(order[start : start + self._batch_size])
            answers, its_seconds = self._generate(batch)
            tokens |= answers
            seconds += its_seconds
            busy += batch.num_tokens
            longest = batch.max_new_tokens if self._runs_to_maximum else max(batch.lengths)
            steps += longest * len(batch)
            lengths = [len(request.prompt_ids) for request in batch.requests]
            padding += max(lengths) * len(lengths) - sum(lengths)
            columns += max(lengths) * len(lengths)
        return Outcome(tokens, seconds, {"padding": padding / columns, "slots_busy": busy / steps})
