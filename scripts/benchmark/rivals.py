"""Who competes: our engine first, then each rival with the settings it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.models.int8 import what_is_missing
from pipeline.models.quantising import quantise
from pipeline.models.vlm import VisionLanguageModel
from scripts.benchmark.checkpoint import load_ours, write_checkpoint
from scripts.benchmark.contest import Entry
from scripts.benchmark.openvino_rival import NotAvailable, OpenVINO
from scripts.benchmark.ours import EngineContender, UncachedContender
from scripts.benchmark.plain_loop import PlainLoop
from scripts.benchmark.shapes import NetworkShape
from scripts.benchmark.static_batches import StaticBatches, timed
from scripts.benchmark.transformers_rival import TransformersModel, is_installed
from scripts.benchmark.workload import Workload, make_workload

CPU = torch.device("cpu")
OURS = "captionjob"
OURS_INT8 = "captionjob-int8"
RIVALS = (
    "transformers",
    "sorted",
    "plain",
    "plain-float32",
    "one",
    "uncached",
    OURS_INT8,
    "openvino",
    "openvino-int8",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of a workload each gets to do; a smaller share where a contender is slow."""

    images: int
    slots: int
    prefill: int
    static_images: int
    static_batches: tuple[int, ...]
    plain_images: int
    one_images: int
    uncached_images: int


class Field:
    """All entries of one shape and dtype; networks are loaded once, when first asked for."""

    def __init__(
        self,
        shape: NetworkShape,
        work: Path,
        dtype: torch.dtype,
        sizes: Sizes,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self._shape, self._work, self._dtype, self._sizes = shape, work, dtype, sizes
        folder = self._folder = write_checkpoint(shape, work)
        self.ours = load_ours(shape, folder, dtype, device)
        self._transformers: TransformersModel | None = None
        self.ours_int8: VisionLanguageModel | None = None
        self.workers: dict[str, OpenVINO] = {}
        self.skipped: list[str] = []

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def transformers(self) -> TransformersModel:
        """The network as transformers runs it."""
        if self._transformers is None:
            self._transformers = TransformersModel(
                self._shape, self._folder, self._dtype, self.device
            )
        return self._transformers

    def has_transformers(self, rivals: Sequence[str]) -> bool:
        """True if transformers is installed, and asked for."""
        return is_installed() and bool({"transformers", "sorted"} & set(rivals))

    def entries(self, rivals: Sequence[str]) -> list[Entry]:
        """Return our entry and those of the rivals named."""
        sizes = self._sizes
        ours = EngineContender(
            OURS,
            self.ours,
            self._dtype,
            slots=sizes.slots,
            prefill=sizes.prefill,
            device=self.device,
        )
        entries = [Entry(OURS, ours, sizes.images, self.dtype_name)]
        makers: dict[str, Callable[[], list[Entry]]] = {
            "transformers": lambda: self._static("transformers", is_sorted=False),
            "sorted": lambda: self._static("sorted", is_sorted=True),
            "plain": lambda: self._plain("plain", self._dtype),
            "plain-float32": self._plain_float32,
            "one": self._one,
            "uncached": self._uncached,
            OURS_INT8: self._ours_int8,
            "openvino": lambda: self._openvino("openvino"),
            "openvino-int8": lambda: self._openvino("openvino-int8"),
        }
        for rival in rivals:
            entries += makers[rival]()
        return entries

    def _static(self, rival: str, *, is_sorted: bool) -> list[Entry]:
        if not is_installed():
            self.skipped.append(f"{rival}: skipped, transformers is not installed here")
            return []
        what = "transformers, sorted by length" if is_sorted else "transformers"
        return [
            Entry(
                rival,
                StaticBatches(
                    f"{what}, batches of {size}",
                    timed(self.transformers.generate),
                    size,
                    is_sorted=is_sorted,
                ),
                self._sizes.static_images,
                self.dtype_name,
            )
            for size in self._sizes.static_batches
        ]

    def _plain(self, rival: str, dtype: torch.dtype) -> list[Entry]:
        loop = PlainLoop(self._shape, self._folder, dtype, self.device)
        size, name = self._sizes.plain_images, str(dtype).removeprefix("torch.")
        title = f"plain cache loop, {name}, batches of {size}"
        contender = StaticBatches(title, timed(loop.generate), size, runs_to_maximum=True)
        return [Entry(rival, contender, size, name)]

    def _plain_float32(self) -> list[Entry]:
        if self._dtype == torch.float32:
            self.skipped.append("plain-float32: skipped, the same as plain here")
            return []
        return self._plain("plain-float32", torch.float32)

    def _one(self) -> list[Entry]:
        one = EngineContender(
            "one image at a time", self.ours, self._dtype, slots=1, prefill=1, device=self.device
        )
        return [Entry("one", one, self._sizes.one_images, self.dtype_name)]

    def _uncached(self) -> list[Entry]:
        uncached = UncachedContender("one at a time, without a cache", self.ours)
        return [Entry("uncached", uncached, self._sizes.uncached_images, self.dtype_name)]

    def _ours_int8(self) -> list[Entry]:
        missing = "of processors only"
        if self.device.type == "cpu":
            missing = what_is_missing(self._dtype) or ""
        if missing:
            self.skipped.append(f"{OURS_INT8}: skipped, {missing}")
            return []
        model = self.ours_int8 = load_ours(self._shape, self._folder, self._dtype)
        seen = [one.images for one in self._calibration.requests if one.images is not None]
        quantise(model, lambda: model.encode_images(seen))
        sizes = self._sizes
        contender = EngineContender(
            "captionjob, 8 bit", model, self._dtype, slots=sizes.slots, prefill=sizes.prefill
        )
        return [Entry(OURS_INT8, contender, sizes.images, "int8")]

    @property
    def _calibration(self) -> Workload:
        """Pictures by which 8-bit forms are made."""
        return make_workload(self._shape, 8, is_skewed=True, seed=1)

    def _openvino(self, rival: str) -> list[Entry]:
        if self.device.type != "cpu":
            self.skipped.append(f"{rival}: skipped, it runs on a processor")
            return []
        is_int8 = rival.endswith("int8")
        calibration = self._calibration if is_int8 else None
        try:
            worker = OpenVINO(
                self._shape, self._folder, self._dtype, self._work, calibration=calibration
            )
        except NotAvailable as reason:
            self.skipped.append(f"{rival}: skipped, {reason}")
            return []
        self.workers[rival] = worker
        what = "OpenVINO, 8 bit" if is_int8 else "OpenVINO"
        return [
            Entry(
                rival,
                StaticBatches(f"{what}, batches of {size}", worker.generate, size),
                self._sizes.static_images,
                "int8" if is_int8 else self.dtype_name,
            )
            for size in self._sizes.static_batches
        ]

    def close(self) -> None:
        """End the processes of rivals."""
        for worker in self.workers.values():
            worker.close()
