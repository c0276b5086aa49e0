"""`verify` holds rows against images, and sees each kind of damage."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.cli import cli
from jobs.results import read_output
from jobs.verify import Verification, verify_output
from jobs.verify_view import SampleRequest, print_verification
from pipeline.errors import RequestError
from pipeline.fixtures import make_photo_shard
from tests.commands import captionjob
from tests.jobs.conftest import Job
from tests.jobs.outputs import HOSTILE, make_output, several_captions, small_pieces


def problems(job: Job) -> list[str]:
    return [str(problem) for problem in verify_output(job.out, job.shards).problems]


def rewrite(path: Path, change: pa.Table) -> None:
    metadata = pq.read_schema(path).metadata
    pq.write_table(change.replace_schema_metadata(metadata), path)


def rows_of(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read()


def test_a_finished_job_holds_with_hostile_names(hostile_job: Job) -> None:
    found = verify_output(hostile_job.out, hostile_job.shards)
    assert found.problems == ()
    assert found.num_images == found.num_rows == len(HOSTILE) + 3 + 20
    assert found.num_bytes == sum(Path(shard).stat().st_size for shard in hostile_job.shards)


def test_each_row_that_is_lost_doubled_or_swapped_is_named(own_job: Job) -> None:
    path = next(own_job.out.glob("second-*.parquet"))
    rows = rows_of(path)
    rewrite(path, rows.slice(0, 5))
    assert any(
        "15 x images without a row, first index 5, 005.jpg" in one for one in problems(own_job)
    )
    rewrite(path, pa.concat_tables([rows, rows.slice(3, 1)]))
    assert any("images with 2 rows, wanted 1, first index 3" in one for one in problems(own_job))
    hashes = rows.column("sha256").to_pylist()
    swapped = rows.set_column(
        rows.schema.get_field_index("sha256"),
        rows.schema.field("sha256"),
        pa.array([hashes[1], hashes[0], *hashes[2:]]),
    )
    rewrite(path, swapped)
    assert any(
        "2 x rows with another image's hash, first index 0" in one for one in problems(own_job)
    )
    more = pa.array([*range(19), 77])
    rewrite(path, rows.set_column(1, rows.schema.field("index"), more))
    assert {"rows without an image", "images without a row"} <= {
        problem.what for problem in verify_output(own_job.out, own_job.shards).problems
    }


def test_another_key_or_member_name_is_seen(own_job: Job) -> None:
    path = next(own_job.out.glob("second-*.parquet"))
    rows = rows_of(path)
    for name in ("key", "member"):
        place = rows.schema.get_field_index(name)
        values = ["other", *rows.column(name).to_pylist()[1:]]
        rewrite(path, rows.set_column(place, rows.schema.field(name), pa.array(values)))
        assert any(f"rows with another {name}" in one for one in problems(own_job))


def test_a_file_that_is_cut_or_of_another_job_is_named(own_job: Job) -> None:
    path = next(own_job.out.glob("second-*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    found = problems(own_job)
    assert any("no Parquet file of captionjob" in one for one in found)
    assert any("no rows of this shard" in one for one in found)
    rows = rows_of(next(own_job.out.glob("hostile-*.parquet")))
    path.write_bytes(whole)
    meta = {**pq.read_schema(path).metadata, b"captionjob.fingerprint": b"0" * 16}
    pq.write_table(rows_of(path).replace_schema_metadata(meta), path)
    assert any("made with other settings" in one for one in problems(own_job))
    assert rows.num_rows


def test_a_column_that_is_not_the_jobs_is_seen(own_job: Job) -> None:
    path = next(own_job.out.glob("second-*.parquet"))
    rows = rows_of(path)
    rewrite(path, rows.append_column("extra", pa.array([1] * rows.num_rows)))
    assert any("columns that are not the job's" in one for one in problems(own_job))


def test_settings_that_were_edited_are_seen(own_job: Job) -> None:
    path = own_job.out / "_job.json"
    record = json.loads(path.read_text())
    record["settings"]["prompt"] = "another one"
    path.write_text(json.dumps(record))
    assert any("_job.json: the fingerprint is" in one for one in problems(own_job))


def test_a_changed_cut_or_missing_shard_is_seen(own_job: Job) -> None:
    shard = Path(own_job.shards[1])
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    found = problems(own_job)
    assert any("its bytes have changed" in one for one in found)
    assert any("cannot be read to its end" in one for one in found)
    shard.write_bytes(whole)
    alone = Job(own_job.folder, own_job.out, own_job.shards[:1])
    assert any("rows of a shard that is not in --shards" in one for one in problems(alone))
    other = make_photo_shard(own_job.folder / "third.tar", 2)
    more = Job(own_job.folder, own_job.out, [*own_job.shards, other])
    assert any("no rows of this shard" in one for one in problems(more))


def test_moved_shards_are_known_by_their_bytes(hostile_job: Job, tmp_path: Path) -> None:
    for shard in hostile_job.shards:
        shutil.copy(shard, tmp_path / f"moved-{Path(shard).name}")
    assert verify_output(hostile_job.out, [str(tmp_path)]).problems == ()


def test_pieces_are_not_a_finished_shard(tmp_path: Path) -> None:
    from jobs.config import LimitSettings

    shard = make_photo_shard(tmp_path / "s.tar", 30)
    out = make_output(
        tmp_path / "out", [shard], commit=small_pieces(), limits=LimitSettings(samples=20)
    )
    found = verify_output(out, [shard])
    whats = {problem.what: problem.count for problem in found.problems}
    assert whats == {"not finished: its rows are in pieces": 1, "images without a row": 10}
    assert read_output(out).shards[0].table().column("index").to_pylist() == list(range(20))


def test_a_tar_without_its_end_is_whole_where_that_was_asked_for(tmp_path: Path) -> None:
    shard = make_photo_shard(tmp_path / "s.tar", 3)
    data = Path(shard).read_bytes().rstrip(b"\0")
    Path(shard).write_bytes(data + bytes(-len(data) % 512))
    out = make_output(tmp_path / "out", [shard], has_lenient_end=True)
    assert [problem.count for problem in verify_output(out, [shard]).problems] == [1]
    assert verify_output(out, [shard], has_lenient_end=True).problems == ()


def test_several_captions_are_counted(tmp_path: Path) -> None:
    shard = make_photo_shard(tmp_path / "s.tar", 5)
    out = make_output(tmp_path / "out", [shard], sampling=several_captions())
    assert verify_output(out, [shard]).problems == ()
    path = next(out.glob("*.parquet"))
    rows = rows_of(path)
    rewrite(path, rows.slice(1))
    whats = [problem.what for problem in verify_output(out, [shard]).problems]
    assert whats == ["images with wrong caption indices", "images with 2 rows, wanted 3"]


def sampled(job: Job, count: int) -> tuple[int, str]:
    stream = io.StringIO()
    code = print_verification(job.out, job.shards, SampleRequest(count), stream, as_json=False)
    return code, stream.getvalue()


def test_a_sample_is_captioned_again_alone(tmp_path: Path) -> None:
    shard = make_photo_shard(tmp_path / "s.tar", 12)
    job = Job(tmp_path, make_output(tmp_path / "out", [shard]), [shard])
    code, text = sampled(job, 5)
    assert code == 0
    assert "5 rows captioned again alone: 5 exactly the same (100.0%)" in text


def test_captions_that_came_out_differently_are_shown_safely(own_job: Job) -> None:
    """The job's answers were hostile ones; alone the scripted network gives its own."""
    code, text = sampled(own_job, 1000)
    assert code == 1
    assert f"34 rows captioned again alone: {34 - len(HOSTILE) - 1} exactly" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.endswith("NOT all holds\n")


def test_the_network_must_be_the_one_that_made_the_captions(own_job: Job) -> None:
    with pytest.raises(RequestError, match="--sample needs the network"):
        print_verification(
            own_job.out,
            own_job.shards,
            SampleRequest(1, model="scripted:fail=x"),
            io.StringIO(),
            as_json=False,
        )


def test_json_says_the_same(hostile_job: Job) -> None:
    stream = io.StringIO()
    code = print_verification(hostile_job.out, hostile_job.shards, None, stream, as_json=True)
    found = json.loads(stream.getvalue())
    assert code == 0
    assert found["holds"] is True
    assert found["problems"] == []


def test_wrong_requests_are_one_line_and_exit_code_2(hostile_job: Job, tmp_path: Path) -> None:
    shard = hostile_job.shards[0]
    for arguments in (
        ("verify", str(tmp_path / "none"), "--shards", shard),
        ("verify", str(tmp_path), "--shards", shard),
        ("verify", str(hostile_job.out), "--shards", str(tmp_path / "none.tar")),
        ("verify", str(hostile_job.out), "--shards", shard, "--sample", "0"),
    ):
        done = captionjob(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1


def test_the_command_is_there() -> None:
    assert {"status", "verify", "export", "import"} <= set(cli.commands)
    assert Verification((), 0, 0, 0, 0, 0.0).bytes_per_second == 0
