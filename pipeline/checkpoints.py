"""Checkpoints: found in a folder or on the Hugging Face Hub, and recognised by their config.

Nothing here reads weights or imports torch, so a wrong name is told at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import CheckpointError

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
WEIGHT_PATTERNS = ("*.safetensors",)
TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
CODE_PATTERNS = ("*.py",)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with a config.json; `name` is what the user called it."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Example:
    """A published checkpoint, with what it costs: numbers of weights, and of cache a token."""

    hub_id: str
    num_weights: int
    cache_numbers_per_token: int  # 2 x layers x key-value heads x head width

    def memory(self, bytes_a_number: int) -> str:
        """Say the weights' and the cache's memory at 4 (float32) or 2 bytes a number."""
        weights = self.num_weights * bytes_a_number / 1e9
        cache = self.cache_numbers_per_token * bytes_a_number / 1e3
        return f"{weights:.1f} GB, {cache:.0f} kB of cache a token"


@dataclass(frozen=True, slots=True)
class Family:
    """One line of `captionjob models`: what runs it, what its folder must hold, examples."""

    name: str
    backend: str
    summary: str
    example: str  # what to give to --model
    needs: str
    examples: tuple[Example, ...] = ()


DEFAULT = Family(
    "default",
    "native",
    "built in: short captions of photographs, 16 MB, no download",
    "default",
    "nothing",
)
NANOVLM = Family(
    "nanovlm",
    "native",
    "nanoVLM, all three generations: 222M, 450M, and 230M-8k / 460M-8k with tiles",
    "lusxvr/nanoVLM-460M-8k",
    "config.json, model.safetensors; tokenizer.json here, or the lm_tokenizer that config names",
    (
        Example("lusxvr/nanoVLM-222M", 222_081_600, 2 * 30 * 3 * 64),
        Example("lusxvr/nanoVLM-230M-8k", 228_063_936, 2 * 30 * 3 * 64),
        Example("lusxvr/nanoVLM-450M", 450_614_400, 2 * 32 * 5 * 64),
        Example("lusxvr/nanoVLM-460M-8k", 460_113_984, 2 * 32 * 5 * 64),
    ),
)
_HF_NEEDS = (
    "config.json, *.safetensors, preprocessor_config.json or processor_config.json, "
    "tokenizer.json, a chat template"
)
IDEFICS3 = Family(
    "idefics3",
    "native",
    "SmolVLM, SmolVLM2 and Idefics3, with and without image splitting",
    "HuggingFaceTB/SmolVLM-256M-Instruct",
    _HF_NEEDS,
    (
        Example("HuggingFaceTB/SmolVLM-256M-Instruct", 256_000_000, 2 * 30 * 3 * 64),
        Example("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 256_000_000, 2 * 30 * 3 * 64),
        Example("HuggingFaceTB/SmolVLM-500M-Instruct", 507_000_000, 2 * 32 * 5 * 64),
        Example("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2_250_000_000, 2 * 24 * 32 * 64),
        Example("HuggingFaceM4/Idefics3-8B-Llama3", 8_460_000_000, 2 * 32 * 8 * 128),
    ),
)
LLAVA = Family(
    "llava",
    "native",
    "LLaVA with a llama decoder and a SigLIP or CLIP tower: LLaVA 1.5, JoyCaption",
    "fancyfeast/llama-joycaption-beta-one-hf-llava",
    _HF_NEEDS,
    (
        Example("llava-hf/llava-1.5-7b-hf", 7_060_000_000, 2 * 32 * 32 * 128),
        Example("fancyfeast/llama-joycaption-beta-one-hf-llava", 8_480_000_000, 2 * 32 * 8 * 128),
    ),
)
TRANSFORMERS = Family(
    "transformers",
    "transformers",
    "anything else that transformers loads as image-text-to-text: Qwen-VL, InternVL, PaliGemma",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    f"pip install 'captionjob[transformers]'; {_HF_NEEDS}",
    (Example("Qwen/Qwen2.5-VL-3B-Instruct", 3_750_000_000, 2 * 36 * 2 * 128),),
)
FAMILIES: tuple[Family, ...] = (DEFAULT, NANOVLM, IDEFICS3, LLAVA, TRANSFORMERS)


def recognise(folder: CheckpointFolder) -> Family:
    """Tell a checkpoint's family by the keys of its config.json; `TRANSFORMERS` for the rest.

    Raises CheckpointError where the config is none of a model at all.
    """
    config = read_config_values(folder)
    if "vit_hidden_dim" in config and "lm_hidden_dim" in config:
        return NANOVLM
    kind = config.get("model_type")
    if kind in ("smolvlm", "idefics3"):
        return IDEFICS3
    if kind == "llava" and _is_native_llava(config):
        return LLAVA
    if isinstance(kind, str) or config.get("architectures"):
        return TRANSFORMERS
    raise CheckpointError(
        f"--model {folder.name!r}: {folder.path / 'config.json'} has neither nanoVLM's keys "
        "(vit_hidden_dim, lm_hidden_dim) nor a model_type"
    )


def read_config_values(folder: CheckpointFolder) -> Mapping[str, object]:
    """Read config.json; CheckpointError where it is no JSON object."""
    path = folder.path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model {folder.name!r}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"--model {folder.name!r}: {path} is not a JSON object")
    return config


def _is_native_llava(config: Mapping[str, object]) -> bool:
    text, vision = config.get("text_config"), config.get("vision_config")
    text_kind = text.get("model_type", "llama") if isinstance(text, dict) else "llama"
    towers = ("clip_vision_model", "siglip_vision_model")
    vision_kind = vision.get("model_type", towers[0]) if isinstance(vision, dict) else towers[0]
    return text_kind == "llama" and vision_kind in towers


def find_checkpoint(model: str, *, with_code: bool = False) -> CheckpointFolder:
    """Return the folder of a path, or of a hub id `ORG/NAME[@REVISION]`, downloaded if need be.

    From the hub come safetensors and texts only, and code `with_code`. Raises CheckpointError,
    in one line, where there is no such model.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"--model {model!r}: the folder has no config.json")
        return CheckpointFolder(folder, folder.resolve().name)
    if folder.exists():
        raise CheckpointError(f"--model {model!r} is a file; wanted a checkpoint's folder")
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise CheckpointError(
            f"--model {model!r}: no such folder; wanted `default`, a checkpoint's folder, "
            "or a hub id such as HuggingFaceTB/SmolVLM-256M-Instruct"
        )
    patterns = WEIGHT_PATTERNS + TEXT_PATTERNS + (CODE_PATTERNS if with_code else ())
    path = _download(match[1], match[2], patterns)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"--model {model!r}: the hub's files hold no config.json")
    return CheckpointFolder(path, model)


def find_tokenizer(folder: CheckpointFolder) -> Path:
    """Return where a nanoVLM checkpoint's tokenizer lies: upstream saves only its name."""
    name = read_config_values(folder).get("lm_tokenizer")
    places = [folder.path]
    if isinstance(name, str) and name:
        places += [folder.path / Path(name).name, folder.path.parent / Path(name).name]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place
    if isinstance(name, str) and _HUB_ID.fullmatch(name):
        return _download(name, None, TEXT_PATTERNS)
    raise CheckpointError(
        f"--model {folder.name!r}: no tokenizer.json in {folder.path}, and lm_tokenizer "
        f"{name!r} is neither a folder beside it nor a hub id"
    )


def _download(hub_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Fetch a snapshot, or find it in the local cache (HF_HUB_OFFLINE=1 uses that alone)."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise CheckpointError(
            f"--model {hub_id!r}: there is no such folder, and models from the hub need "
            "huggingface_hub; wanted: pip install 'captionjob[hub]'"
        ) from None
    place = hub_id if revision is None else f"{hub_id}@{revision}"
    try:
        # Files in sub-folders are other formats of the same weights.
        found = snapshot_download(
            hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except errors.GatedRepoError:
        reason = "the hub wants you to accept its terms and to log in: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "neither a folder here nor a public model on the hub"
    except errors.RevisionNotFoundError:
        reason = f"the hub's model has no revision {revision}"
    except errors.LocalEntryNotFoundError:
        reason = "neither a folder here nor in the hub's local cache, and the hub is not reached"
    except (OSError, ValueError) as error:
        lines = str(error).splitlines() or [repr(error)]
        reason = f"the hub answers: {lines[0]}"
    else:
        return Path(str(found))
    raise CheckpointError(f"--model {place!r}: {reason}")
