"""The three-line doors of the README: other tools open the output as it lies there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import REPOSITORY
from tests.jobs.conftest import Job
from tests.jobs.outputs import HOSTILE

NUM_ROWS = len(HOSTILE) + 3 + 20
DOORS = {
    "pandas": """\
import pandas as pd
rows = pd.read_parquet("captions")
print(rows[rows.status == "ok"].nsmallest(20, "mean_logprob")[["key", "caption"]])
""",
    "polars": """\
import polars as pl
rows = pl.scan_parquet("captions/*.parquet")
print(rows.group_by("status").agg(pl.len(), pl.mean("num_caption_tokens")).collect())
""",
    "duckdb": """\
import duckdb
print(duckdb.sql("select caption, count(*) as images from 'captions/*.parquet' "
                 "where status = 'ok' group by caption order by images desc limit 20"))
""",
    "datasets": """\
from datasets import load_dataset
rows = load_dataset("parquet", data_files="captions/*.parquet", split="train")
print(rows.filter(lambda row: row["status"] == "ok")[0]["caption"])
""",
}


@pytest.fixture
def captions(hostile_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output under the name that the README has for it."""
    (tmp_path / "captions").symlink_to(hostile_job.out)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tool", DOORS)
def test_each_door_opens(
    tool: str,
    captions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(tool)
    if tool == "datasets":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", captions / "cache")
    found: dict[str, object] = {}
    exec(DOORS[tool], found)
    assert capsys.readouterr().out
    rows = found.get("rows")
    if tool in ("pandas", "datasets"):
        assert len(rows) == NUM_ROWS  # type: ignore[arg-type]


def test_the_readme_s_own_lines_run(captions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", captions / "cache")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    for block in blocks:
        if re.search(r"^(import|from) (pandas|polars|duckdb|datasets)\b", block, re.MULTILINE):
            exec(block, {})
