"""A decode step over fixed memory: captured once for each shape, then replayed as it is.

    lengths ─┐                                                      ┌─► ids ──► Said
    last ids ┼─► embed ─► layers (keys and values by index) ─► choose ┴─► log probabilities
    numbers ─┘   └──────────── one CUDA graph a (rows, columns) ───────────┘

On a GPU the host needs longer to queue a step's thousand small kernels than the GPU to run them.
A graph queues all of them at once, and runs exactly what was captured: the same kernels on the same
memory. So nothing of a step may be a Python value but its shape. All else lies in buffers that are
filled before: lengths, which say where keys go and what may be seen, the rows' random numbers,
and whether a row may end. Ids never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from pipeline.engine.cache import KVCache, StepView, columns_for
from pipeline.engine.decoding import places_of, rounded_rows
from pipeline.engine.device import CapturingDevice, refill
from pipeline.engine.memory import is_out_of_memory
from pipeline.engine.said import Said
from pipeline.engine.sampling import Draws, Sampler, widened_dtype
from pipeline.engine.sequence import Sequence
from pipeline.models.vlm import CaptionModel

GRAPH_COLUMNS = 128  # a step reads up to so many columns in vain, and there are a few graphs only
FINE_ROWS = 64  # up to here rows are rounded to eights, above to an eighth of themselves
Shape = tuple[int, int]  # rows, columns


class StaticDecoder:
    """Owns the buffers of a step, and a graph for each shape that came twice.

    The first step of a shape runs call by call, which also prepares whatever its kernels need;
    the second is captured. Where a capture fails, or memory is short, steps run call by call.
    """

    def __init__(
        self,
        model: CaptionModel,
        cache: KVCache,
        said: Said,
        sampler: Sampler,
        device: CapturingDevice,
        notices: list[str],
    ) -> None:
        self._model = model
        self._cache = cache
        self._said = said
        self._sampler = sampler
        self._device = device
        self._notices = notices
        slots, place = cache.num_slots, device.place
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=place)
        self._places = torch.zeros(slots, dtype=torch.int64, device=place)
        self._uniforms = torch.zeros(slots, dtype=torch.float64, device=place)
        self._is_short = torch.zeros(slots, dtype=torch.bool, device=place)
        self._ids = torch.zeros(slots, dtype=torch.int64, device=place)
        self._logits: Tensor | None = None  # [N, V]; the first step knows V
        self._logprobs: Tensor | None = None
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, Callable[[], None]] = {}
        self._is_capturing = True

    def step(self, live: Rows[Sequence], max_rows: int) -> tuple[Tensor, Tensor]:
        """Run a step as `Decoder` says."""
        num_rows = min(graph_rows(len(live)), max_rows)
        lengths = self._cache.lengths[:num_rows]
        self._fill(live, lengths)
        self._run((num_rows, columns_for(max(lengths), GRAPH_COLUMNS, self._cache)))
        assert self._logprobs is not None, "a step leaves its log probabilities"
        return self._ids[: len(live)], self._logprobs[: len(live)]

    def give_up_memory(self) -> bool:
        """Let graphs go, for good; False if there are none."""
        if not self._graphs:
            return False
        self._notices.append(
            f"out of memory while captured decode steps ({len(self._graphs)}) take some: "
            "from now on none is captured"
        )
        self._stop_capturing()
        return True

    def _fill(self, live: Rows[Sequence], lengths: list[int]) -> None:
        """Bring over what the host knows of a step's rows; none beyond the live ones counts."""
        draws = self._sampler.draws(live)
        refill(self._lengths, torch.tensor(lengths))
        if draws.uniforms is not None:
            refill(self._uniforms, draws.uniforms)
        if self._sampler.holds_back:
            nobody = torch.zeros(len(live), dtype=torch.bool)
            refill(self._is_short, nobody if draws.is_short is None else draws.is_short)
        if self._sampler.num_kept:
            refill(self._places, places_of(live, self._sampler.num_kept))

    def _run(self, shape: Shape) -> None:
        if shape not in self._graphs and shape in self._seen and self._is_capturing:
            self._capture(shape)
        self._seen.add(shape)
        replay = self._graphs.get(shape)
        if replay is not None:
            replay()
        else:
            self._network(*shape)

    def _capture(self, shape: Shape) -> None:
        try:
            self._graphs[shape] = self._device.capture(lambda: self._network(*shape))
        except RuntimeError as error:
            if is_out_of_memory(error) and self.give_up_memory():
                return
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._notices.append(f"decode steps run uncaptured, and slower: {why}")
            self._stop_capturing()

    def _stop_capturing(self) -> None:
        self._graphs.clear()
        self._is_capturing = False

    def _network(self, num_rows: int, num_columns: int) -> None:
        """Run a step from buffers to buffers; what is captured."""
        view = StepView(self._cache, self._lengths[:num_rows], num_columns)
        ids = self._said.last[:num_rows, None]
        logits = self._model.next_logits(ids, None, view.positions, view.mask, view)
        if self._logits is None or self._logprobs is None:
            wide = widened_dtype(logits)
            size = (self._cache.num_slots, logits.shape[1])
            self._logits = torch.empty(size, dtype=wide, device=logits.device)
            self._logprobs = torch.empty(size[0], dtype=wide, device=logits.device)
        # Rows of their own: the sampler's room grows with the largest prefill, and graphs cannot
        # follow it to another place.
        room = self._logits[:num_rows]
        chosen, logprobs = self._sampler.select(logits, self._draws(num_rows), room)
        self._ids[:num_rows].copy_(chosen)
        self._logprobs[:num_rows].copy_(logprobs)
        self._said.go_on(chosen, self._places[:num_rows])

    def _draws(self, num_rows: int) -> Draws:
        sampler, every = self._sampler, self._said.every
        return Draws(
            uniforms=self._uniforms[:num_rows] if sampler.draws_numbers else None,
            is_short=self._is_short[:num_rows] if sampler.holds_back else None,
            said=None if every is None else every[:num_rows],
        )


def graph_rows(num_rows: int) -> int:
    """Return how many rows a captured step runs for so many live ones: few shapes in all."""
    if num_rows <= FINE_ROWS:
        return rounded_rows(num_rows)
    block = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // block) * block
