"""Do our networks give the tokens of the code they come from? Exit code 0 if all of them do.

    scripts/parity           nanoVLM's reference cases, and tiny random checkpoints of each family
    scripts/parity --full    also full-size random SmolVLM-256M and nanoVLM-222M shapes, a mixed
                             batch of 32 in float32, bfloat16's error, and the memory of loading
    scripts/parity --int8    how far `--quantize int8` is off, and nothing else

The checkers are transformers, and for nanoVLM tokens that its own code made; the full-size
nanoVLM is checked against transformers' SigLIP and Llama with the same weights. Each line says
how many tokens agree, and how far the logits are apart. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.captioner import SamplingSettings
from pipeline.engine.engine import Engine, EngineShape
from pipeline.engine.stopping import StopRules
from pipeline.models.idefics3 import load_idefics3
from pipeline.models.linear import lay_out
from pipeline.models.llava import load_llava
from pipeline.models.nanovlm import NanoVLMSpec, load_nanovlm, weight_layout
from pipeline.models.projector import pixel_shuffle
from pipeline.models.stored import read_config
from pipeline.models.vlm import VisionLanguageModel
from pipeline.processors.idefics3 import Idefics3Processor
from pipeline.processors.llava import LlavaProcessor
from pipeline.records import ImageFacts, ImageInputs, Request, SampleRef
from scripts.agreement import agreement
from tests.models import test_idefics3, test_llava, test_nanovlm
from tests.models.checkpoints import (
    QUESTIONS,
    Checker,
    TinyIdefics3,
    picture,
    quiet,
    randomise,
)
from tests.models.stepping import greedy_steps, uncached_logits

Prepared = tuple[tuple[int, ...], ImageInputs]
CPU = torch.device("cpu")
NUM_ROWS = 32
SIZES = ((640, 480), (480, 640), (500, 500), (900, 300), (256, 200), (300, 800), (64, 64))


class Report:
    """Prints a line a check, and remembers whether all agreed."""

    def __init__(self) -> None:
        self.is_good = True

    def line(self, name: str, found: Tensor, wanted: Tensor, apart: float, since: float) -> None:
        """Compare tokens `[B, N]`."""
        equal, all_tokens = int((found == wanted).sum()), wanted.numel()
        is_good = equal == all_tokens and apart <= 2e-4
        self.is_good &= is_good
        share = 100 * equal / all_tokens
        print(
            f"{name:42} {equal:4}/{all_tokens} tokens ({share:.0f} %)  "
            f"|logit difference| {apart:.1e}  {time.perf_counter() - since:5.1f} s"
            f"{'' if is_good else '  WRONG'}",
            flush=True,
        )

    def check(self, text: str, is_good: bool) -> None:
        """Print a finding of another kind."""
        self.is_good &= is_good
        print(f"{text}{'' if is_good else '  WRONG'}", flush=True)


def references(report: Report) -> None:
    """nanoVLM's reference cases, whose tokens its own code made."""
    data = test_nanovlm.DATA
    head = load_nanovlm(data / "tiny", torch.float32, CPU)
    first = load_nanovlm(data / "tiny_v01", torch.float32, CPU)
    for name in (*test_nanovlm.HEAD_CASES, *test_nanovlm.SOLO_V01):
        started = time.perf_counter()
        tensors, is_first = test_nanovlm.case(name), name.startswith("v01")
        images = test_nanovlm.images_of(tensors, test_nanovlm.TILES_PER_ROW.get(name, ()))
        prompts = test_nanovlm.prompts_of(tensors)
        if is_first:
            prompts = test_nanovlm.v01_prompts(tensors, first)
        wanted = tensors["step_logits"]
        logits, tokens = greedy_steps(first if is_first else head, prompts, images, len(wanted))
        apart = float((logits - wanted).abs().max())
        report.line(f"nanoVLM reference {name}", tokens, tensors["tokens"], apart, started)


def tiny_checkpoints(report: Report) -> None:
    """Tiny random checkpoints of the other families, against transformers."""
    pictures = [picture(*size) for size in test_idefics3.SIZES]
    for tiny in (*test_idefics3.TINY, *test_llava.TINY):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            tiny.save(folder)
            is_idefics3 = isinstance(tiny, TinyIdefics3)
            processor: Any = (Idefics3Processor if is_idefics3 else LlavaProcessor)(folder)
            model: Any = (load_idefics3 if is_idefics3 else load_llava)(folder, torch.float32, CPU)
            checked = Checker(folder).run(pictures, QUESTIONS, 12)
            ready = [processor.prepare(*each) for each in zip(pictures, QUESTIONS, strict=True)]
            logits, tokens = greedy_steps(
                model, [ids for ids, _ in ready], [images for _, images in ready], 12
            )
        apart = float((logits - checked.logits).abs().max())
        report.line(f"tiny: {tiny.name}"[:42], tokens, checked.tokens, apart, started)


def engine_tokens(
    model: VisionLanguageModel, ready: Sequence[Prepared], num_tokens: int, num_slots: int
) -> Tensor:
    """Run prepared prompts through the engine, slots refilled as they free up: `[B, N]`.

    The network's weights are laid out as a job lays them out.
    """
    lay_out(model)
    shape = EngineShape(num_slots, 4, max(len(ids) for ids, _ in ready), torch.float32, CPU)
    settings = SamplingSettings(max_new_tokens=num_tokens, max_repeats=0)
    engine = Engine(model, shape, settings, StopRules(frozenset(), num_tokens))
    for row, (ids, images) in enumerate(ready):
        ref = SampleRef("parity", row, str(row), "")
        engine.submit(Request(ref, ImageFacts(), tuple(ids), images))
    engine.close()
    found: dict[int, list[int]] = {}
    while len(found) < len(ready):
        for ended in engine.step():
            found[ended.request.ref.index] = ended.token_ids
    return torch.tensor([found[row] for row in range(len(ready))])


def questions() -> list[str]:
    """Return 32 prompts of different lengths."""
    return [f"{QUESTIONS[row % 3]} {'very ' * (row % 5)}well" for row in range(NUM_ROWS)]


def pictures() -> list[Any]:
    """Return 32 pictures of seven shapes."""
    return [picture(*SIZES[row % len(SIZES)], seed=row) for row in range(NUM_ROWS)]


def smolvlm(report: Report, num_tokens: int) -> None:
    """A SmolVLM-256M by its shapes: SigLIP-B/16 at 512, SmolLM2-135M, factor 4."""
    tiny = TinyIdefics3(
        "SmolVLM-256M",
        kind="smolvlm",
        tile=128,  # a sixteenth of a 512 tile's patches, so that a processor ends in minutes
        image_size=512,
        patch=16,
        factor=4,
        width=576,
        heads=9,
        kv_heads=3,
        vision_heads=12,
        image={"size": {"longest_edge": 256}},
        text={
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "vocab_size": 49_280,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        vision={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny.save(folder)
        started = time.perf_counter()
        checker, processor = Checker(folder), Idefics3Processor(folder)
        ready = [processor.prepare(*each) for each in zip(pictures(), questions(), strict=True)]
        tiles = [len(images.pixels) for _, images in ready]
        print(f"SmolVLM-256M: {NUM_ROWS} prompts, {min(tiles)} to {max(tiles)} tiles each")
        checked = run_in_parts(checker, num_tokens)
        model = load_idefics3(folder, torch.float32, CPU)
        found = engine_tokens(model, ready, num_tokens, 16)
        logits, _ = greedy_steps(
            model, [ids for ids, _ in ready[:4]], [images for _, images in ready[:4]], num_tokens
        )
        apart = float((logits - checked[1][:, :4]).abs().max())
        report.line("SmolVLM-256M by its shapes, float32", found, checked[0], apart, started)
        half_precision(report, folder, checker, ready[:6])
        del checker, model
        gc.collect()
        loading(report, folder, "pipeline.models.idefics3", "load_idefics3")


def run_in_parts(checker: Checker, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Let the library run the 32 prompts eight at a time: tokens `[32, N]`, logits of some."""
    tokens, first = [], None
    for start in range(0, NUM_ROWS, 8):
        part = slice(start, start + 8)
        checked = checker.run(pictures()[part], questions()[part], num_tokens)
        tokens.append(checked.tokens)
        first = checked.logits if first is None else first
    assert first is not None
    return torch.cat(tokens), first


def half_precision(
    report: Report, folder: Path, checker: Checker, ready: Sequence[Prepared]
) -> None:
    """Compare bfloat16's error, ours and the library's, with float32."""
    started = time.perf_counter()
    half = Checker(folder, torch.bfloat16)
    ours = load_idefics3(folder, torch.bfloat16, CPU)
    sums = torch.zeros(2)
    for row, (ids, images) in enumerate(ready):
        inputs = checker.inputs([pictures()[row]], [questions()[row]])
        with torch.inference_mode(), quiet():
            wanted = checker.model(**inputs).logits[0, -1]
            theirs = half.model(**inputs.to(torch.bfloat16)).logits[0, -1].float()
        mine = uncached_logits(ours, ids, [images])
        sums += torch.stack([(each - wanted).square().mean() for each in (mine, theirs)])
    mine_error, their_error = (sums / len(ready)).sqrt().tolist()
    report.check(
        f"  in bfloat16: root mean square error of logits {mine_error:.4f}, "
        f"transformers' {their_error:.4f}  {time.perf_counter() - started:.1f} s",
        mine_error <= 1.05 * their_error,
    )


MEASURE = """
import sys, torch
from importlib import import_module
from pathlib import Path
from pipeline.models.linear import lay_out
load = getattr(import_module(sys.argv[1]), sys.argv[2])
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
model = load(Path(sys.argv[3]), getattr(torch, sys.argv[4]), torch.device("cpu"))
weights = sum(p.numel() * p.element_size() for p in model.parameters())
lay_out(model)
print(weights, peak() - before)
"""


def loading(report: Report, folder: Path, module: str, function: str) -> None:
    """Measure the high-water mark of a process that only loads, and lays the weights out."""
    if not Path("/proc/self/status").exists():
        return
    for dtype in ("float32", "bfloat16"):
        started = time.perf_counter()
        command = [sys.executable, "-c", MEASURE, module, function, str(folder), dtype]
        printed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        weights, peak = (int(part) for part in printed.stdout.split())
        report.check(
            f"  loading in {dtype}: {weights / 1e6:.0f} MB of weights, at most {peak / 1e6:.0f} MB "
            f"({peak / weights:.2f} times)  {time.perf_counter() - started:.1f} s",
            # The head's matrix is there twice: for a moment, or for good where it is tied.
            peak < 1.25 * weights,
        )


def nanovlm(report: Report, num_tokens: int) -> None:
    """A nanoVLM-222M by its shapes, against SigLIP and Llama of transformers, same weights."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = json.loads((test_nanovlm.DATA / "tiny_v01/config.json").read_text())
        config |= {"vit_hidden_dim": 768, "vit_inter_dim": 3072, "vit_patch_size": 16}
        config |= {"vit_img_size": 224, "vit_n_heads": 12, "vit_n_blocks": 12}
        config |= {"lm_hidden_dim": 576, "lm_inter_dim": 1536, "lm_n_heads": 9, "lm_n_kv_heads": 3}
        config |= {"lm_n_blocks": 30, "lm_vocab_size": 49_152, "lm_max_position_embeddings": 8192}
        (folder / "config.json").write_text(json.dumps(config))
        spec = NanoVLMSpec.from_config(read_config(folder))
        vision, text, projection = library_parts(spec)
        save_as_nanovlm(folder, spec, vision, text, projection)
        started = time.perf_counter()
        processor = test_nanovlm.processor_of("tiny_v01", **config)
        ready = [processor.prepare(*each) for each in zip(pictures(), questions(), strict=True)]
        model = load_nanovlm(folder, torch.float32, CPU)
        pixels = torch.cat([images.pixels for _, images in ready]).float() / 255
        with torch.inference_mode():
            seen = vision(pixels).last_hidden_state
            image_tokens = pixel_shuffle(seen, spec.shuffle_factor) @ projection.T
        wanted, logits = library_tokens(text, [ids for ids, _ in ready], image_tokens, num_tokens)
        found = engine_tokens(model, ready, num_tokens, 16)
        mine, _ = greedy_steps(
            model, [ids for ids, _ in ready[:4]], [images for _, images in ready[:4]], 1
        )
        apart = float((mine[0] - logits[:4]).abs().max())
        report.line("nanoVLM-222M by its shapes, float32", found, wanted, apart, started)
        del model, vision, text
        gc.collect()
        loading(report, folder, "pipeline.models.nanovlm", "load_nanovlm")


def library_parts(spec: NanoVLMSpec) -> tuple[Any, Any, Tensor]:
    """Make transformers' SigLIP and Llama of nanoVLM's sizes, and a projection `[C, 4 E]`."""
    import transformers

    vision_config = transformers.SiglipVisionConfig(
        hidden_size=spec.vision.hidden_size,
        intermediate_size=spec.vision.intermediate_size,
        num_hidden_layers=spec.vision.num_layers,
        num_attention_heads=spec.vision.num_heads,
        image_size=spec.vision.image_size,
        patch_size=spec.vision.patch_size,
        vision_use_head=False,
    )
    text_config = transformers.LlamaConfig(
        hidden_size=spec.decoder.hidden_size,
        intermediate_size=spec.decoder.intermediate_size,
        num_hidden_layers=spec.decoder.num_layers,
        num_attention_heads=spec.decoder.num_heads,
        num_key_value_heads=spec.decoder.num_kv_heads,
        vocab_size=spec.decoder.vocab_size,
        rms_norm_eps=spec.decoder.norm_eps,
        max_position_embeddings=spec.decoder.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": spec.decoder.rope_theta},
        tie_word_embeddings=True,
    )
    with quiet():
        vision = transformers.SiglipVisionModel(vision_config).eval()
        text = transformers.LlamaForCausalLM(text_config).eval()
    randomise(vision, seed=1)
    randomise(text, seed=2)
    text.tie_weights()
    width = spec.vision.hidden_size * spec.shuffle_factor**2
    generator = torch.Generator().manual_seed(3)
    projection = torch.randn(spec.decoder.hidden_size, width, generator=generator)
    return vision, text, projection * width**-0.5


def save_as_nanovlm(
    folder: Path, spec: NanoVLMSpec, vision: Any, text: Any, projection: Tensor
) -> None:
    """Save the library's weights under nanoVLM's names."""
    stored = {f"vision.{name}": tensor for name, tensor in vision.state_dict().items()}
    stored |= {f"text.{name}": tensor for name, tensor in text.state_dict().items()}
    stored["projection"] = projection
    names = {
        "vision_encoder.patch_embedding.conv.": "embeddings.patch_embedding.",
        "vision_encoder.patch_embedding.position_embedding": "embeddings.position_embedding.weight",
        "vision_encoder.layer_norm.": "post_layernorm.",
        ".ln1.": ".layer_norm1.",
        ".ln2.": ".layer_norm2.",
        ".attn.q_proj.": ".self_attn.q_proj.",
        ".attn.k_proj.": ".self_attn.k_proj.",
        ".attn.v_proj.": ".self_attn.v_proj.",
        "vision_encoder.blocks.": "encoder.layers.",
        "decoder.blocks.": "model.layers.",
        ".norm1.": ".input_layernorm.",
        ".norm2.": ".post_attention_layernorm.",
        "decoder.norm.": "model.norm.",
        "decoder.head.": "model.embed_tokens.",
        "MP.proj.weight": "projection",
    }
    tensors: dict[str, Tensor] = {}
    for sources in weight_layout(spec).sources.values():
        for source in sources:
            name = source.names[0]
            is_vision = name.startswith("vision")
            part = "vision." if is_vision else "" if name.startswith("MP") else "text."
            theirs = name
            for ours, other in names.items():
                theirs = theirs.replace(ours, other)
            out = ".self_attn.out_proj." if is_vision else ".self_attn.o_proj."
            theirs = theirs.replace(".attn.out_proj.", out)
            tensors[name] = fetch(stored, part + theirs)
    save_file(tensors, folder / "model.safetensors")


def fetch(stored: dict[str, Tensor], name: str) -> Tensor:
    """Find a tensor of the library, by its name with or without the tower's own prefix."""
    if "qkv_proj" in name:
        parts = (name.replace("attn.qkv_proj", f"self_attn.{part}_proj") for part in "qkv")
        return torch.cat([fetch(stored, part) for part in parts])
    if name not in stored:
        name = name.replace("vision.", "vision.vision_model.", 1)
    return stored[name].contiguous()


@torch.inference_mode()
def library_tokens(
    text: Any, prompts: Sequence[Sequence[int]], image_tokens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Decode with the library's Llama: tokens `[B, N]`, and the first logits `[B, V]`.

    The image's vectors stand before the text, padding before both.
    """
    num_places = image_tokens.shape[1]
    longest = max(len(prompt) for prompt in prompts)
    embed = text.get_input_embeddings()
    rows, masks = [], []
    for prompt, image in zip(prompts, image_tokens, strict=True):
        words = embed(torch.tensor(list(prompt[num_places:])))
        padding = longest - len(prompt)
        rows.append(torch.cat((torch.zeros(padding, words.shape[1]), image, words)))
        masks.append(torch.tensor([0] * padding + [1] * len(prompt)))
    text.generation_config.eos_token_id = None
    text.generation_config.pad_token_id = 0
    with quiet():
        found = text.generate(
            inputs_embeds=torch.stack(rows),
            attention_mask=torch.stack(masks),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.sequences[:, -num_tokens:], found.logits[0].float()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also full-size random networks")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens of the full-size ones")
    parser.add_argument("--int8", action="store_true", help="how far 8 bits are off")
    options = parser.parse_args()
    report = Report()
    started = time.perf_counter()
    checks: list[Callable[[Report], None]] = [references, tiny_checkpoints]
    if options.int8:
        checks = [lambda each: agreement(each.check)]
    elif options.full:
        checks.append(lambda each: smolvlm(each, options.tokens))
        checks.append(lambda each: nanovlm(each, options.tokens))
    for check in checks:
        check(report)
    verdict = "all agree" if report.is_good else "NOT all agree"
    print(f"{verdict}; {math.ceil(time.perf_counter() - started)} s")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
