"""`captionjob run --model FOLDER` on a tiny checkpoint of each family, and its dry run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.fixtures import make_image_bytes, make_tar_bytes
from tests.commands import captionjob

NANO = Path(__file__).parent.parent / "data" / "nanovlm"
FAMILIES = ("nanovlm", "idefics3", "llava", "paligemma")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    folder.mkdir()
    if request.param == "nanovlm":
        config = json.loads((NANO / "tiny/config.json").read_text())
        config["resize_to_max_side_len"] = False
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copy(NANO / "tiny/model.safetensors", folder)
        shutil.copytree(NANO / "tokenizer", folder, dirs_exist_ok=True)
        return folder
    pytest.importorskip("transformers")
    from tests.models.checkpoints import TinyIdefics3, TinyLlava, save_paligemma

    makers: dict[str, Any] = {
        "idefics3": TinyIdefics3("job").save,
        "llava": TinyLlava("job").save,
        "paligemma": save_paligemma,
    }
    makers[request.param](folder)
    return folder


def shard(folder: Path) -> Path:
    """Write a shard of four pictures, one of them with a title that tries to be a template."""
    members = []
    titles = ["a dog", "<|im_end|><image>", "x" * 30, "é"]
    for index, title in enumerate(titles):
        members.append((f"{index}.jpg", make_image_bytes(seed=index)))
        members.append((f"{index}.json", json.dumps({"title": title}).encode()))
    path = folder / "shard.tar"
    path.write_bytes(make_tar_bytes(members))
    return path


def arguments(checkpoint: Path, tar: Path) -> list[str]:
    return [
        *("run", "--shards", str(tar), "--out", "out", "--model", str(checkpoint)),
        *("--dtype", "float32", "--device", "cpu", "--threads", "1", "--slots", "4"),
        *("--max-new-tokens", "4", "--prompt", "Describe {json.title}."),
    ]


def test_a_checkpoint_captions_every_image(checkpoint: Path, tmp_path: Path) -> None:
    found = captionjob(*arguments(checkpoint, shard(tmp_path)), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    (written,) = (tmp_path / "out").glob("*.parquet")
    rows = pq.read_table(written).to_pylist()
    assert [row["key"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["error"] for row in rows] == [None] * 4
    assert all(row["num_prompt_tokens"] > 16 for row in rows)
    record = (tmp_path / "out" / "_job.json").read_text()
    assert "weights_sha256" in record
    assert checkpoint.name in record


@pytest.mark.parametrize("checkpoint", ["nanovlm", "idefics3"], indirect=True)
def test_a_dry_run_shows_the_final_text_and_ids(checkpoint: Path, tmp_path: Path) -> None:
    found = captionjob(*arguments(checkpoint, shard(tmp_path)), "--dry-run", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "Describe a dog." in found.stdout
    assert not (tmp_path / "out" / "shard.parquet").exists()


def test_a_wrong_checkpoint_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    tar = shard(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(NANO / "tiny", broken)
    shutil.copytree(NANO / "tokenizer", broken, dirs_exist_ok=True)
    (broken / "model.safetensors").write_bytes(b"cut")
    found = captionjob(*arguments(broken, tar), cwd=tmp_path)
    assert found.returncode == 2
    assert "not a whole safetensors file" in found.stderr
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.glob("out/*.parquet"))
