"""Tiny random checkpoints, made and saved by transformers itself: the checker of our families."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

TOKENIZER = Path(__file__).parent.parent / "data" / "nanovlm" / "tokenizer"
ROWS_AND_COLUMNS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QUESTIONS = ("hello", "What is this?", "Describe the image in detail, please.", "")
SIZES = ((90, 200), (64, 64), (300, 50), (33, 47))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' notices out of the tests, whose warnings are errors."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return noise over a slope: every rule of resizing shows in it."""
    rng = np.random.default_rng((width, height, seed))
    slope = np.linspace(0, 155, width)[None, :, None] + np.zeros((height, 1, 3))
    noise = rng.integers(0, 100, (height, width, 3))
    return Image.fromarray((slope + noise).astype(np.uint8))


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every parameter, biases and norms too, so that no wrong name goes unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 100
            parameter.copy_(1 + 0.1 * drawn if is_norm else drawn * 1.5 * fan_in**-0.5)


def tokenizer_with(extra: Sequence[str]) -> Any:
    """Return the stand-in tokenizer with more special tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    tokenizer.padding_side = "left"
    return tokenizer


@dataclass(frozen=True, slots=True)
class TinyIdefics3:
    """What a tiny checkpoint of the family has; `image` are image processor settings."""

    name: str
    kind: str = "idefics3"
    tile: int = 32
    image_size: int = 32
    patch: int = 8
    factor: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    vision_heads: int = 2
    is_tied: bool = False
    shard_size: str = "5GB"
    image: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Save the network and its processor as the library does."""
        with quiet():
            processor = self._processor()
            config = self._config(processor)
            model = self._model_class()(config)
            randomise(model, seed=len(self.name))
            if self.is_tied:
                model.tie_weights()
            model.save_pretrained(folder, max_shard_size=self.shard_size)
            processor.save_pretrained(folder)

    def _model_class(self) -> Any:
        import transformers

        if self.kind == "smolvlm":
            return transformers.SmolVLMForConditionalGeneration
        return transformers.Idefics3ForConditionalGeneration

    def _config(self, processor: Any) -> Any:
        import transformers

        kind = transformers.SmolVLMConfig if self.kind == "smolvlm" else transformers.Idefics3Config
        vision = {
            "hidden_size": 16 * self.vision_heads,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": self.vision_heads,
            "image_size": self.image_size,
            "patch_size": self.patch,
            **self.vision,
        }
        text = {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": len(processor.tokenizer),
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 2,
            **self.text,
        }
        return kind(
            vision_config=vision,
            text_config=text,
            scale_factor=self.factor,
            image_token_id=processor.image_token_id,
            tie_word_embeddings=self.is_tied,
        )

    def _processor(self) -> Any:
        import transformers
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3
        from transformers.models.smolvlm import image_processing_pil_smolvlm as smolvlm

        settings = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": self.tile}}
        settings |= self.image
        tokens_a_tile = (self.tile // self.patch // self.factor) ** 2
        extra = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
        tokenizer = tokenizer_with([*extra, *ROWS_AND_COLUMNS])
        common = {"image_seq_len": tokens_a_tile, "chat_template": SMOLVLM_TEMPLATE}
        is_smolvlm = self.kind == "smolvlm"
        kind = (
            smolvlm.SmolVLMImageProcessorPil if is_smolvlm else idefics3.Idefics3ImageProcessorPil
        )
        images = kind(**settings)
        # SmolVLMProcessor itself asks for torchvision, for its videos. Its texts are the same.
        return transformers.Idefics3Processor(images, tokenizer, **common)


@dataclass(frozen=True, slots=True)
class TinyLlava:
    """What a tiny checkpoint of the LLaVA kind has; `image` are image processor settings."""

    name: str
    tower: str = "clip"
    images: str = "CLIPImageProcessorPil"
    strategy: str = "default"
    layer: int | list[int] = -2
    template: str = SMOLVLM_TEMPLATE
    place: str = "<image>"
    side: int = 32
    is_tied: bool = False
    has_bias: bool = True
    image: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Save the network and its processor as the library does."""
        import transformers

        with quiet():
            processor = self._processor()
            model = transformers.LlavaForConditionalGeneration(self._config(processor))
            randomise(model, seed=len(self.name))
            if self.is_tied:
                model.tie_weights()
            model.save_pretrained(folder)
            processor.save_pretrained(folder)

    def _config(self, processor: Any) -> Any:
        import transformers

        return transformers.LlavaConfig(
            vision_config={
                "model_type": f"{self.tower}_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": self.side,
                "patch_size": 8,
            },
            text_config={
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": len(processor.tokenizer),
                "eos_token_id": 2,
                "bos_token_id": 1,
                "pad_token_id": 2,
                **self.text,
            },
            image_token_index=processor.image_token_id,
            vision_feature_layer=self.layer,
            vision_feature_select_strategy=self.strategy,
            multimodal_projector_bias=self.has_bias,
            tie_word_embeddings=self.is_tied,
        )

    def _processor(self) -> Any:
        import transformers
        from transformers.models.clip import image_processing_pil_clip as clip
        from transformers.models.llava import image_processing_pil_llava as llava
        from transformers.models.siglip import image_processing_pil_siglip as siglip

        kind = next(
            getattr(module, self.images)
            for module in (clip, siglip, llava)
            if hasattr(module, self.images)
        )
        square = {"height": self.side, "width": self.side}
        sizes: dict[str, Any] = {"size": {"shortest_edge": self.side}, "crop_size": square}
        settings = {"size": square} if self.tower == "siglip" else sizes
        return transformers.LlavaProcessor(
            kind(**{**settings, **self.image}),
            tokenizer_with([self.place]),
            patch_size=8,
            vision_feature_select_strategy=self.strategy,
            num_additional_image_tokens=int(self.tower == "clip"),
            image_token=self.place,
            chat_template=self.template,
        )


def save_paligemma(folder: Path) -> None:
    """Save a tiny PaliGemma: no chat template, and a prompt that sees all of itself."""
    import transformers
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    with quiet():
        images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
        images.image_seq_length = 16
        processor = transformers.PaliGemmaProcessor(images, tokenizer_with(["<image>"]))
        text = {
            "model_type": "gemma",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": len(processor.tokenizer) + 4,
        }
        vision = {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 32,
        }
        config = transformers.PaliGemmaConfig(
            text_config=text,
            vision_config=vision,
            projection_dim=32,
            image_token_index=processor.image_token_id,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        )
        model = transformers.PaliGemmaForConditionalGeneration(config)
        randomise(model, seed=3)
        model.tie_weights()
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Checked:
    """What transformers makes of a batch: inputs, logits `[N, B, V]` and tokens `[B, N]`."""

    inputs: Mapping[str, Tensor]
    logits: Tensor
    tokens: Tensor

    def prompt(self, row: int) -> list[int]:
        """Return a row's ids without its padding."""
        real = self.inputs["attention_mask"][row].bool()
        ids: list[int] = self.inputs["input_ids"][row][real].tolist()
        return ids


class Checker:
    """The library's own model and processor of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        with quiet():
            self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
            self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.padding_side = "left"
        self.model.generation_config.eos_token_id = None

    def text(self, question: str, system: str | None = None) -> str:
        """Render the chat of one question."""
        content: Any = [{"type": "image"}, {"type": "text", "text": question}]
        system_content: Any = [{"type": "text", "text": system}]
        if "'type'" not in self.processor.chat_template:  # it reads strings, and adds the picture
            content, system_content = question, system
        chat: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system is not None:
            chat.insert(0, {"role": "system", "content": system_content})
        text: str = self.processor.apply_chat_template(chat, add_generation_prompt=True)
        return text

    def inputs(self, pictures: Sequence[Image.Image], questions: Sequence[str]) -> Any:
        """Make a left-padded batch, with special tokens added as `apply_chat_template` does."""
        texts = [self.text(question) for question in questions]
        bos = self.processor.tokenizer.bos_token
        with quiet():
            return self.processor(
                text=texts,
                images=[[image] for image in pictures],
                padding=True,
                add_special_tokens=not (bos and texts[0].startswith(bos)),
                return_tensors="pt",
            )

    @torch.inference_mode()
    def run(
        self, pictures: Sequence[Image.Image], questions: Sequence[str], num_tokens: int
    ) -> Checked:
        """Decode greedily, never ending early."""
        inputs = self.inputs(pictures, questions)
        inputs = inputs.to(self.model.dtype)
        with quiet():
            found = self.model.generate(
                **inputs,
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        length = inputs["input_ids"].shape[1]
        logits = torch.stack(found.logits).float()
        return Checked(inputs, logits, found.sequences[:, length:])
