"""How far `--quantize int8` is from the network as it is: captions, tokens, logits, memory.

The default model on the example photographs; networks of the shapes of SmolVLM-256M and
nanoVLM-222M with random weights, whose logits after a prompt and after each token of a caption are
compared with those of float32, next to bfloat16's. Called by `scripts/parity --int8`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pipeline.captioner import SpeedSettings
from pipeline.door import load_captioner
from pipeline.errors import SampleError
from pipeline.images.opening import ImageSettings, open_sample
from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from pipeline.models.int8 import what_is_missing
from pipeline.models.linear import lay_out
from pipeline.models.quantising import quantise
from pipeline.models.vlm import VisionLanguageModel
from scripts.benchmark.checkpoint import load_ours, write_checkpoint
from scripts.benchmark.shapes import SHAPES, NetworkShape
from scripts.benchmark.workload import Workload, make_workload

EXAMPLES = Path(__file__).resolve().parent / "examples"
NUM_PICTURES, NUM_TOKENS = 6, 16
FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
MAX_LOGIT_ERROR = 0.1  # of the logits' own spread
LEAST_EQUAL = 0.95  # of the default model's captions


def agreement(check: Callable[[str, bool], None]) -> None:
    """Print a line a network; `check` takes a line, and whether it is good."""
    missing = what_is_missing(torch.bfloat16) or what_is_missing(torch.float32)
    if missing:
        check(f"int8: not compared, {missing}", True)
        return
    _default(check)
    for name in ("smolvlm-256m", "nanovlm-222m"):
        with tempfile.TemporaryDirectory() as work:
            _network(SHAPES[name], Path(work), check)


def _default(check: Callable[[str, bool], None]) -> None:
    pictures = []
    for shard in expand_shards([str(EXAMPLES)]):
        for sample in read_shard(shard):
            try:
                pictures.append(open_sample(sample, ImageSettings())[0])
            except SampleError:
                continue
    captions = {}
    for quantize in ("none", "int8"):
        speed = SpeedSettings(slots=32, threads=1)
        captioner = load_captioner("default", quantize=quantize, speed=speed)
        captions[quantize] = captioner.caption(pictures)
    equal = sum(a == b for a, b in zip(captions["none"], captions["int8"], strict=True))
    check(
        f"default model, int8: {equal} of {len(pictures)} captions equal (no vision transformer)",
        equal >= LEAST_EQUAL * len(pictures),
    )


def _network(shape: NetworkShape, work: Path, check: Callable[[str, bool], None]) -> None:
    folder = write_checkpoint(shape, work)
    pictures = make_workload(shape, NUM_PICTURES, is_skewed=False, seed=11)
    examples = make_workload(shape, NUM_PICTURES, is_skewed=False, seed=12)
    tokens: Tensor | None = None
    logits: dict[str, Tensor] = {}
    said = ""
    for form, dtype in FORMS.items():
        model = load_ours(shape, folder, dtype)
        if form == "int8":
            seen = [one.images for one in examples.requests if one.images is not None]
            said = str(quantise(model, lambda model=model, seen=seen: model.encode_images(seen)))  # type: ignore[misc]
        lay_out(model)
        logits[form] = _logits(model, pictures, tokens)
        if tokens is None:
            tokens = logits[form].argmax(dim=-1)
    exact = logits["float32"]
    for form in ("bfloat16", "int8"):
        error = float((logits[form] - exact).square().mean().sqrt() / exact.std())
        same = float((logits[form].argmax(-1) == exact.argmax(-1)).float().mean())
        check(
            f"{shape.name}, {form}: {same:.1%} of tokens are float32's, logits are off by "
            f"{error:.2%} of their spread",
            error <= MAX_LOGIT_ERROR,
        )
    check(f"{shape.name}, {said}", True)


@torch.inference_mode()
def _logits(model: VisionLanguageModel, pictures: Workload, tokens: Tensor | None) -> Tensor:
    """Return logits `[B, N, V]` behind prompts and the tokens given, or our own greedy ones."""
    rows = []
    for row, request in enumerate(pictures.requests):
        assert request.images is not None, "every request of a benchmark has a picture"
        (features,) = model.encode_images([request.images])
        ids = list(request.prompt_ids)
        found: list[Tensor] = []
        while len(found) < NUM_TOKENS:
            if tokens is not None:
                ids += tokens[row, :-1].tolist()
            wanted = 1 if tokens is None else NUM_TOKENS
            length = len(ids)
            mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            embedded = model.splice(torch.tensor([ids]), features)
            hidden = model.decoder(embedded, torch.arange(length)[None], mask)
            found += model.decoder.logits(hidden[:, -wanted:])[0].float().unbind(0)
            ids.append(int(found[-1].argmax()))
        rows.append(torch.stack(found))
    return torch.stack(rows)
