"""Networks of real size with random weights, and captions whose lengths the weights decide.

A random network would repeat itself for ever, and where it ended would differ with each rounding.
So the vocabulary holds a ladder: `steps` rungs of `tracks` tokens each.

    rung 7: t t t t     a token of rung 7 is followed by one of rung 6, whichever the network
    rung 6: t t t t     likes best of the tracks; after rung 1 comes the end token
    ...
    rung 1: t t t t     a prompt that ends on rung 40 has a caption of 40 tokens

Every contender therefore makes captions of the same lengths, by its own end-token rule and in
any dtype, while the tokens themselves still depend on picture, prompt and arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.models.idefics3 import Idefics3, Idefics3Spec
from pipeline.models.language import DecoderSpec
from pipeline.models.nanovlm import Generation, NanoVLM, NanoVLMSpec
from pipeline.models.pixels import PixelScale
from pipeline.models.vision import VisionSpec
from pipeline.models.vlm import VisionLanguageModel

EOS_ID = 2
LADDER_NORM = 24.0  # of a rung's direction in the embedding: it outweighs what the blocks add


@dataclass(frozen=True, slots=True)
class Ladder:
    """Which ids stand on which rung."""

    first_id: int
    steps: int
    tracks: int

    def token(self, rung: int, track: int) -> int:
        """Return the id of a track of a rung; rungs count from 1."""
        return self.first_id + (rung - 1) * self.tracks + track

    @property
    def end_id(self) -> int:
        """The first id behind the ladder."""
        return self.first_id + self.steps * self.tracks


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """A network's sizes and its ladder."""

    name: str
    family: str  # nanovlm or smolvlm: which of our classes runs it
    vision: VisionSpec
    decoder: DecoderSpec
    shuffle_factor: int
    image_token_id: int
    ladder: Ladder

    @property
    def num_image_tokens(self) -> int:
        """Prompt places that one picture takes."""
        return (self.vision.patches_per_side // self.shuffle_factor) ** 2

    @property
    def layout_spec(self) -> Idefics3Spec:
        """The same sizes under the family whose tensor names transformers has."""
        return Idefics3Spec(self.vision, self.decoder, self.shuffle_factor, self.image_token_id)

    @property
    def pixel_scale(self) -> PixelScale:
        """What the family makes of 8-bit pixels."""
        if self.family == "nanovlm":
            return PixelScale.zero_to_one()
        return PixelScale.standardised(1 / 255, (0.5,) * 3, (0.5,) * 3)

    def build(self) -> VisionLanguageModel:
        """Build our own network, its weights not yet set."""
        if self.family == "nanovlm":
            sizes = (self.vision, self.decoder, self.shuffle_factor, self.image_token_id)
            return NanoVLM(NanoVLMSpec(Generation.PLACEHOLDERS, *sizes))
        return Idefics3(self.layout_spec, self.pixel_scale)


def _decoder(vocab_size: int) -> DecoderSpec:
    # SmolLM2-135M. The head is a matrix of its own, as in SmolVLM: a ladder needs one, and a step
    # reads just as much of a tied one.
    return DecoderSpec(
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=vocab_size,
        rope_theta=100_000.0,
        is_head_tied=False,
    )


def _tower(image_size: int, *, spreads_positions: bool) -> VisionSpec:
    return VisionSpec(768, 3072, 12, 12, image_size, 16, spreads_positions=spreads_positions)


def _tiny(name: str, family: str) -> NetworkShape:
    is_smol = family == "smolvlm"
    return NetworkShape(
        name=name,
        family=family,
        vision=VisionSpec(32, 64, 2, 2, 32, 8, spreads_positions=is_smol),
        decoder=DecoderSpec(3, 4, 2, 16, 64, 96, 768, rope_theta=10_000.0, is_head_tied=False),
        shuffle_factor=2,
        image_token_id=5,
        ladder=Ladder(16, 32, 16),
    )


SHAPES: dict[str, NetworkShape] = {
    "nanovlm-222m": NetworkShape(
        name="nanovlm-222m",
        family="nanovlm",
        vision=_tower(224, spreads_positions=False),
        decoder=_decoder(49_152),
        shuffle_factor=2,
        image_token_id=5,
        ladder=Ladder(1024, 256, 128),
    ),
    "smolvlm-256m": NetworkShape(
        name="smolvlm-256m",
        family="smolvlm",
        vision=_tower(512, spreads_positions=True),
        decoder=_decoder(49_280),
        shuffle_factor=4,
        image_token_id=49_190,
        ladder=Ladder(1024, 256, 128),
    ),
    "tiny-nanovlm": _tiny("tiny-nanovlm", "nanovlm"),
    "tiny-smolvlm": _tiny("tiny-smolvlm", "smolvlm"),
}


def fill_random(model: VisionLanguageModel, ladder: Ladder, seed: int = 0) -> None:
    """Give a network seeded random weights and its ladder."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                spread = _spread(name, parameter, model.spec.num_layers)
                parameter.normal_(0.0, spread, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        width = model.spec.hidden_size
        rungs = torch.randn(ladder.steps + 1, width, generator=generator)
        rungs /= rungs.norm(dim=-1, keepdim=True)
        head = model.decoder.head
        assert isinstance(head, nn.Linear), "a ladder needs a head of its own"
        embedding = model.decoder.embedding.weight
        # Row r - 1 of `here` is rung r's own direction; the head listens one rung further up.
        here = rungs[1:].repeat_interleave(ladder.tracks, dim=0)
        span = slice(ladder.first_id, ladder.end_id)
        embedding[span] += LADDER_NORM * here
        head.weight[ladder.first_id : ladder.end_id - ladder.tracks] += here[ladder.tracks :]
        head.weight[EOS_ID] += rungs[1]


def _spread(name: str, parameter: torch.Tensor, num_layers: int) -> float:
    """Return the deviation of a matrix's numbers.

    Blocks keep the scale of what they read, so that small networks are as lively as large ones;
    the decoder's share their additions to its stream out among them, and the ladder outweighs all.
    """
    if "blocks" not in name:
        return 0.02
    is_addition = name.startswith("decoder") and name.endswith(("out.weight", "down.weight"))
    share = (2 * num_layers) ** -0.5 if is_addition else 1.0
    return float(share * parameter[0].numel() ** -0.5)
