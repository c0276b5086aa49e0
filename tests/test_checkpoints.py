"""Checkpoints: found, recognised by their keys, and refused in one line that helps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints import (
    FAMILIES,
    IDEFICS3,
    LLAVA,
    NANOVLM,
    TRANSFORMERS,
    CheckpointFolder,
    find_checkpoint,
    find_tokenizer,
    recognise,
)
from pipeline.errors import CheckpointError

NANO = Path(__file__).parent / "data" / "nanovlm"


def folder_of(place: Path, config: Any) -> CheckpointFolder:
    (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return CheckpointFolder(place, "given")


def error_of(model: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "smolvlm"}, IDEFICS3),
        ({"model_type": "idefics3"}, IDEFICS3),
        ({"model_type": "llava"}, LLAVA),
        ({"model_type": "llava", "text_config": {"model_type": "mistral"}}, TRANSFORMERS),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, TRANSFORMERS),
        ({"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}}, LLAVA),
        ({"model_type": "qwen2_5_vl"}, TRANSFORMERS),
        ({"architectures": ["SomethingNew"]}, TRANSFORMERS),
    ],
)
def test_families_are_told_by_their_keys(tmp_path: Path, config: Any, family: Any) -> None:
    assert recognise(folder_of(tmp_path, config)) is family


@pytest.mark.parametrize("name", ["tiny", "tiny_v01"])
def test_nanovlm_is_told_by_its_keys(name: str) -> None:
    assert recognise(find_checkpoint(str(NANO / name))) is NANOVLM


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 3}, "neither nanoVLM's keys"),
        ([1, 2], "not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_models_config_is_told(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        recognise(folder_of(tmp_path, config))
    assert "\n" not in str(caught.value)


def test_wrong_places_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert "is a file" in error_of(str(tmp_path / "file"))
    assert "no config.json" in error_of(str(tmp_path / "empty"))
    assert "no such folder" in error_of(str(tmp_path / "absent"))
    assert "no such folder" in error_of("smolvlm")


def test_a_folder_has_its_own_name() -> None:
    assert find_checkpoint(str(NANO / "tiny")) == CheckpointFolder(NANO / "tiny", "tiny")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answer for the hub with `answer`, raised or returned; `asked` is what was asked."""
    import huggingface_hub

    state: dict[str, Any] = {"answer": str(NANO / "tiny")}

    def snapshot_download(hub_id: str, **options: Any) -> str:
        state["asked"] = (hub_id, options)
        if isinstance(state["answer"], Exception):
            raise state["answer"]
        return str(state["answer"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_hub_ids_may_have_a_revision(hub: dict[str, Any]) -> None:
    folder = find_checkpoint("ORG/some.Model-2@refs/pr/3")
    assert folder == CheckpointFolder(NANO / "tiny", "ORG/some.Model-2@refs/pr/3")
    hub_id, options = hub["asked"]
    assert (hub_id, options["revision"]) == ("ORG/some.Model-2", "refs/pr/3")


def test_only_safetensors_and_texts_are_fetched(hub: dict[str, Any]) -> None:
    find_checkpoint("ORG/model")
    patterns = hub["asked"][1]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(kind in pattern for pattern in patterns for kind in ("py", "bin", "pt", "onnx"))
    find_checkpoint("ORG/model", with_code=True)
    assert "*.py" in hub["asked"][1]["allow_patterns"]


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error: Exception = kind.__new__(kind)  # they want a whole HTTP response
    error.args = ("line one\nline two",)
    return error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GatedRepoError", "accept its terms"),
        ("RepositoryNotFoundError", "neither a folder here nor a public model"),
        ("RevisionNotFoundError", "no revision v9"),
        ("LocalEntryNotFoundError", "not reached"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: dict[str, Any], name: str, message: str) -> None:
    hub["answer"] = hub_error(name)
    error = error_of("ORG/model@v9")
    assert message in error
    assert "ORG/model@v9" in error


def test_a_lost_connection_is_one_line(hub: dict[str, Any]) -> None:
    hub["answer"] = ConnectionError("reset\nby peer")
    assert error_of("ORG/model").endswith("the hub answers: reset")


def test_offline_mode_asks_the_local_cache_alone(tmp_path: Path) -> None:
    program = (
        "import sys; from pipeline.checkpoints import find_checkpoint\n"
        "from pipeline.errors import CheckpointError\n"
        "try: find_checkpoint('ORG/model')\n"
        "except CheckpointError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=root
    )
    assert "local cache" in found.stdout, found.stderr


def test_nanovlms_tokenizer_is_found_where_people_put_it(
    tmp_path: Path, hub: dict[str, Any]
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    folder = folder_of(place, {"lm_tokenizer": "ORG/words"})
    hub["answer"] = "fetched"
    assert find_tokenizer(folder) == Path("fetched")
    assert "*.safetensors" not in hub["asked"][1]["allow_patterns"]
    for where in (tmp_path / "words", place / "words", place):
        shutil.copytree(NANO / "tokenizer", where, dirs_exist_ok=True)
        assert find_tokenizer(folder) == where


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"lm_tokenizer": "nowhere"})
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        find_tokenizer(folder)


def test_every_family_says_what_people_need_to_choose() -> None:
    names = [family.name for family in FAMILIES]
    assert names == ["default", "nanovlm", "idefics3", "llava", "transformers"]
    for family in FAMILIES:
        assert family.summary
        assert family.needs
        for example in family.examples:
            assert example.hub_id.count("/") == 1
    smolvlm = IDEFICS3.examples[0]
    assert smolvlm.memory(2) == "0.5 GB, 23 kB of cache a token"


def test_choosing_a_checkpoint_imports_no_torch() -> None:
    program = "import sys, pipeline.checkpoints; print('torch' in sys.modules)"
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    assert found.stdout.strip() == "False"
