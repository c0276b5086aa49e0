"""The result commands as a user types them: what they print is plain text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jobs.cli import cli
from jobs.commands_results import FORMATS
from jobs.export.run import FORMATS as KNOWN
from pipeline.errors import RequestError
from tests.jobs.conftest import Job


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def shards(job: Job) -> list[str]:
    return [word for shard in job.shards for word in ("--shards", shard)]


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_the_formats_of_the_help_are_those_there_are() -> None:
    assert tuple(KNOWN) == FORMATS


def test_status_and_verify(hostile_job: Job) -> None:
    for command in ("status", "verify"):
        done = run(command, hostile_job.out, *shards(hostile_job))
        assert done.exit_code == 0, done.output
        assert is_plain(done.output)
        as_json = run(command, hostile_job.out, *shards(hostile_job), "--json")
        assert isinstance(json.loads(as_json.output), dict)
    assert run("verify", hostile_job.out, *shards(hostile_job)[:2]).exit_code == 1


def test_report(hostile_job: Job, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = run("report", hostile_job.out, *shards(hostile_job), "--to", page, "--pictures", "5")
    assert done.exit_code == 0, done.output
    assert is_plain(done.output)
    assert page.exists()


@pytest.mark.parametrize("to", FORMATS)
def test_export(hostile_job: Job, tmp_path: Path, to: str) -> None:
    dest = tmp_path / "dest"
    done = run("export", hostile_job.out, dest, "--to", to, *shards(hostile_job))
    assert done.exit_code == 0, done.output
    assert "rows -> " in done.output
    again = run("export", hostile_job.out, dest, "--to", to, *shards(hostile_job))
    assert isinstance(again.exception, RequestError)
    more = ("--overwrite", "--status", "ok")
    assert (
        run("export", hostile_job.out, dest, "--to", to, *shards(hostile_job), *more).exit_code == 0
    )


def test_export_says_what_it_left_out_and_did_not_check(hostile_job: Job, tmp_path: Path) -> None:
    done = run("export", hostile_job.out, tmp_path / "a", "--to", "jsonl")
    assert "without --shards their join to images is not checked" in done.output
    done = run("export", hostile_job.out, tmp_path / "b", "--to", "jsonl", *shards(hostile_job)[:2])
    assert "left out: the rows of 1 shard not in --shards" in done.output


def test_import(own_job: Job, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    url = ("--image-url", "https://host/{key}.jpg")
    assert run("export", own_job.out, tasks, "--to", "label-studio", *url).exit_code == 0
    found = json.loads(tasks.read_text(encoding="utf-8"))
    found[0]["annotations"] = [
        {"id": 1, "completed_by": 5, "result": found[0]["predictions"][0]["result"]}
    ]
    tasks.write_text(json.dumps(found))
    done = run("import", own_job.out, tasks, "--from", "label-studio")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("1 answer: 0 changed, 1 as the model had them; 31 tasks without")


def test_compare(hostile_job: Job, tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    outs = (hostile_job.out, hostile_job.out)
    done = run("compare", *outs, *shards(hostile_job), "--to", page)
    assert done.exit_code == 0, done.output
    assert is_plain(done.output)
    assert page.exists()
    assert json.loads(run("compare", *outs, "--json").output)["same"] == 34
