"""OpenVINO in its own process and environment: batches by file name in, tokens and seconds out.

Run by `openvino_rival`, with the Python of an environment that has `optimum-intel`; nothing of
captionjob is imported. Each line of standard input is a request in JSON, each line of standard
output its answer. A batch's file is read before its clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from optimum.intel import OVModelForVisualCausalLM  # type: ignore[import-not-found,unused-ignore]

QUANTISED_PICTURES = 8
CLOCK = [time.perf_counter]


def main() -> None:
    """Load or export the network, say that it is ready, and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("exported", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    chosen = parser.parse_args()
    CLOCK[0] = time.process_time if chosen.clock == "cpu" else time.perf_counter
    channel = _take_channel()
    torch.set_num_threads(chosen.threads)
    model = _load(chosen)
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(model, json.loads(line))), file=channel, flush=True)


def _take_channel() -> TextIO:
    """Return standard output for answers alone: what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def _load(chosen: argparse.Namespace) -> Any:
    if not chosen.exported.is_dir():
        partial = chosen.exported.with_name(f"{chosen.exported.name}.partial")
        exported = OVModelForVisualCausalLM.from_pretrained(
            chosen.folder, export=True, compile=False, load_in_8bit=chosen.int8
        )
        if chosen.int8:
            _quantise_vision(exported, chosen.calibration)
        exported.save_pretrained(partial)
        partial.rename(chosen.exported)
    config = {
        "INFERENCE_PRECISION_HINT": chosen.precision,
        # Its default is an 8-bit cache, which no other contender has.
        "KV_CACHE_PRECISION": "u8" if chosen.int8 else chosen.precision,
        "INFERENCE_NUM_THREADS": str(chosen.threads),
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = OVModelForVisualCausalLM.from_pretrained(chosen.exported, ov_config=config)
    _count_positions(model.vision_embeddings)
    return model


def _count_positions(tower: Any) -> None:
    """Give each patch of a full picture its own row of the position table.

    Here optimum-intel's arithmetic rounds some patches into their neighbours' rows, so its
    captions would be those of another network; its speed is the same.
    """
    forward = tower.forward

    def counted(pixel_values: Any, patch_position_ids: torch.Tensor, **others: Any) -> Any:
        rows = torch.arange(patch_position_ids.shape[1]).expand_as(patch_position_ids)
        return forward(pixel_values=pixel_values, patch_position_ids=rows, **others)

    tower.forward = counted


def _quantise_vision(model: Any, calibration: Path) -> None:
    """Make weights and activations of the vision tower 8-bit, from a few pictures."""
    import nncf  # type: ignore[import-not-found,unused-ignore]

    part = model.vision_embeddings
    pixels = torch.from_numpy(np.load(calibration)["pixels"][:QUANTISED_PICTURES])
    names = [port.get_any_name() for port in part.model.inputs]
    feeds = [_vision_inputs(model, names, picture[None]) for picture in pixels]
    part.model = nncf.quantize(
        part.model,
        nncf.Dataset(feeds),
        subset_size=len(feeds),
        model_type=nncf.ModelType.TRANSFORMER,
    )


def _vision_inputs(model: Any, names: list[str], picture: torch.Tensor) -> dict[str, Any]:
    patch = model.config.vision_config.patch_size
    side = picture.shape[-1] // patch
    known = {
        "pixel_values": picture.numpy(),
        "patch_attention_mask": np.ones((1, side, side), dtype=bool),
        "patch_position_ids": np.arange(side * side, dtype=np.int64)[None],
    }
    return {name: known[name] for name in names}


@torch.inference_mode()
def _answer(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    batch = np.load(asked["batch"])
    pixels = torch.from_numpy(batch["pixels"])[:, None]
    if asked["what"] == "vision":
        began = CLOCK[0]()
        model.get_vision_embeddings(pixel_values=pixels, input_ids=torch.zeros(1, 2))
        return {"seconds": CLOCK[0]() - began}
    ids, mask = torch.from_numpy(batch["ids"]), torch.from_numpy(batch["mask"])
    moments: list[float] = []
    began = CLOCK[0]()
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=asked["max_new_tokens"],
        do_sample=False,
        eos_token_id=asked["eos_id"],
        pad_token_id=asked["eos_id"],
        stopping_criteria=[_watch(moments)],
        **({"pixel_values": pixels} if len(pixels) else {}),
    )
    seconds = CLOCK[0]() - began
    return {"seconds": seconds, "tokens": out[:, ids.shape[1] :].tolist(), "moments": moments}


def _watch(moments: list[float]) -> Any:
    def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        moments.append(CLOCK[0]())
        return torch.zeros(len(ids), dtype=torch.bool)

    return note


if __name__ == "__main__":
    main()
