"""Each format read back by what reads it in real life: nothing is lost on the way."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv
from webdataset.tariterators import group_by_keys, tar_file_expander

from jobs.corrections import CORRECTIONS
from jobs.export.options import ExportOptions
from jobs.export.run import MARK, ExportRequest, export
from jobs.imports import import_label_studio
from jobs.results import read_output
from pipeline.errors import JobError, RequestError, ShardError
from pipeline.fixtures import make_image_bytes, make_shard
from pipeline.input.reader import read_shard
from pipeline.input.shards import expand_shards
from pipeline.output.folder import open_folder
from pipeline.records import Row
from tests.jobs.conftest import Job
from tests.jobs.outputs import HOSTILE, make_output, several_captions

Exporter = Callable[..., Path]


@pytest.fixture
def exported(hostile_job: Job, tmp_path: Path) -> Exporter:
    def make(to: str, *, options: ExportOptions | None = None, **changes: Any) -> Path:
        dest = tmp_path / f"{to}.out"
        export(
            ExportRequest(
                out=hostile_job.out,
                to=to,
                dest=dest,
                shards=tuple(hostile_job.shards),
                options=options or ExportOptions(),
                **changes,
            )
        )
        return dest

    return make


def all_rows(job: Job) -> list[Row]:
    return [row for shard in read_output(job.out).shards for row in shard.rows()]


def captioned(job: Job) -> list[Row]:
    return [row for row in all_rows(job) if row.status != "error"]


def images(job: Job) -> dict[tuple[str, int], bytes]:
    return {
        (shard.id, sample.ref.index): sample.data
        for shard in expand_shards(job.shards)
        for sample in read_shard(shard)
    }


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def names_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_webdataset_reads_back_with_images_untouched(hostile_job: Job, exported: Exporter) -> None:
    folder = exported("webdataset")
    originals = images(hostile_job)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for tar in sorted(folder.glob("*.tar")):
        with tar.open("rb") as file:
            for sample in group_by_keys(tar_file_expander([{"url": str(tar), "stream": file}])):
                row = json.loads(sample["captionjob.json"])
                found[row["shard"], row["index"]] = {**sample, "row": row}
    assert len(found) == len(captioned(hostile_job))
    for row in captioned(hostile_job):
        sample = found[row.ref.shard, row.ref.index]
        assert sample["jpg"] == originals[row.ref.shard, row.ref.index]
        assert sample["txt"].decode() == row.caption
        assert sample["row"]["key"] == row.ref.key
        assert sample["row"]["mean_logprob"] == row.mean_logprob
        assert ("json" in sample) == row.ref.shard.startswith("hostile")
        assert not sample["__key__"].startswith(("/", ".."))
        assert sample["__key__"].isprintable()


def test_exported_tars_are_whole_and_can_be_captioned_again(exported: Exporter) -> None:
    for shard in expand_shards([str(exported("webdataset"))]):
        assert list(read_shard(shard))


def test_a_member_that_is_there_already_is_never_replaced_unasked(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "s.tar", [("a.jpg", make_image_bytes()), ("a.txt", b"alt")])
    out = make_output(tmp_path / "out", [shard])

    def request(options: ExportOptions, name: str) -> ExportRequest:
        return ExportRequest(out, "webdataset", tmp_path / name, (shard,), options=options)

    with pytest.raises(RequestError, match="has a member txt already"):
        export(request(ExportOptions(), "no"))
    assert not (tmp_path / "no").exists()
    export(request(ExportOptions(field="caption.txt"), "both"))
    export(request(ExportOptions(replace=True), "one"))
    names = []
    for folder in ("both", "one"):
        with tarfile.open(next((tmp_path / folder).glob("*.tar"))) as tar:
            names.append(tar.getnames())
    assert names[0] == ["a.jpg", "a.txt", "a.caption.txt", "a.captionjob.json"]
    assert names[1] == ["a.jpg", "a.txt", "a.captionjob.json"]


def test_txt_lies_beside_each_image_and_stays_in_its_folder(
    hostile_job: Job, exported: Exporter, tmp_path: Path
) -> None:
    folder = exported("txt")
    originals = images(hostile_job)
    lines = json_lines(folder / "captions.jsonl")
    assert len(lines) == len(captioned(hostile_job))
    rows = {(row.ref.shard, row.ref.index): row for row in captioned(hostile_job)}
    for line in lines:
        row = rows[line["shard"], line["index"]]
        picture = folder / line["file_name"]
        assert picture.read_bytes() == originals[row.ref.shard, row.ref.index]
        assert picture.with_suffix(".txt").read_bytes().decode() == row.caption
        assert picture.resolve().is_relative_to(folder.resolve())
        assert line["key"] == row.ref.key
    assert len(list(names_in(folder))) == 2 * len(lines) + 2
    assert {path.name for path in tmp_path.iterdir()} == {"txt.out"}
    assert (folder / "second.jpg").exists() is False
    assert (folder / "dots.in.key.txt").exists()


def test_txt_without_images(exported: Exporter) -> None:
    folder = exported("txt", options=ExportOptions(with_images=False))
    assert not list(folder.rglob("*.jpg"))
    assert (folder / "plain.txt").read_text() == "a dog on a beach"


def test_jsonl_csv_and_parquet_hold_every_row_and_column(
    hostile_job: Job, exported: Exporter
) -> None:
    tables = [shard.table() for shard in read_output(hostile_job.out).shards]
    wanted = pa.concat_tables(tables).replace_schema_metadata(None)
    lines = json_lines(exported("jsonl"))
    assert lines == wanted.to_pylist()
    options = csv.ConvertOptions(
        column_types=wanted.schema, strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parse = csv.ParseOptions(newlines_in_values=True)
    found = csv.read_csv(exported("csv"), convert_options=options, parse_options=parse)
    assert found.to_pylist() == wanted.to_pylist()
    table = pq.read_table(exported("parquet"))
    assert table.replace_schema_metadata(None).equals(wanted)
    assert b"fingerprint" in table.schema.metadata[b"captionjob"]


def test_parquet_joins_into_a_table_of_the_shards(hostile_job: Job, tmp_path: Path) -> None:
    rows = captioned(hostile_job)
    hashes = [row.facts.sha256 for row in rows][::-1]
    table = pa.table({"sha256": [*hashes, "unknown", None], "key": ["mine"] * (len(hashes) + 2)})
    pq.write_table(table, tmp_path / "meta.parquet")
    options = ExportOptions(table=tmp_path / "meta.parquet", on="sha256")
    dest = tmp_path / "joined.parquet"
    done = export(ExportRequest(hostile_job.out, "parquet", dest, options=options))
    found = pq.read_table(dest)
    assert done.num_rows == len(hashes)
    assert found.column("sha256").to_pylist() == table.column("sha256").to_pylist()
    assert found.column("key").to_pylist() == ["mine"] * table.num_rows
    assert found.column("captionjob_key").to_pylist() == [
        *[r.ref.key for r in rows[::-1]],
        None,
        None,
    ]
    assert found.column("caption").to_pylist() == [*[r.caption for r in rows[::-1]], None, None]
    wrong = ExportOptions(table=tmp_path / "meta.parquet", on="key")
    with pytest.raises(RequestError, match="a join would be a guess"):
        export(ExportRequest(hostile_job.out, "parquet", tmp_path / "x", options=wrong))


def test_coco_has_each_image_once_and_each_caption(hostile_job: Job, exported: Exporter) -> None:
    found = json.loads(exported("coco").read_text(encoding="utf-8"))
    rows = captioned(hostile_job)
    by_id = {image["id"]: image for image in found["images"]}
    assert len(by_id) == len(found["images"]) == len(rows)
    for row, annotation in zip(rows, found["annotations"], strict=True):
        image = by_id[annotation["image_id"]]
        assert annotation["caption"] == row.caption
        assert (image["shard"], image["index"]) == (row.ref.shard, row.ref.index)
        assert (image["file_name"], image["sha256"]) == (row.ref.member, row.facts.sha256)
        assert (image["width"], image["height"]) == (32, 24)


def test_several_captions_of_one_image(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "s.tar", [("a.jpg", make_image_bytes())])
    out = make_output(tmp_path / "out", [shard], sampling=several_captions())
    texts = [row.caption or "" for row in read_output(out).shards[0].rows()]
    for to in ("coco", "txt", "webdataset", "label-studio", "hf"):
        export(ExportRequest(out, to, tmp_path / to, (shard,)))
    coco = json.loads((tmp_path / "coco").read_text())
    assert len(coco["images"]) == 1
    assert [one["caption"] for one in coco["annotations"]] == texts
    assert (tmp_path / "txt" / "a.txt").read_text().split("\n") == texts
    with tarfile.open(next((tmp_path / "webdataset").glob("*.tar"))) as tar:
        assert {"a.txt", "a.1.txt", "a.2.txt"} <= set(tar.getnames())
    assert len(json.loads((tmp_path / "label-studio").read_text())) == 3


def test_hf_opens_with_datasets(hostile_job: Job, exported: Exporter, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = exported("hf")
    data = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    rows = captioned(hostile_job)
    originals = images(hostile_job)
    assert data.num_rows == len(rows)
    assert isinstance(data.features["image"], datasets.Image)
    raw = data.cast_column("image", datasets.Image(decode=False))
    for row, one in zip(rows, raw, strict=True):
        assert one["image"]["bytes"] == originals[row.ref.shard, row.ref.index]
        assert one["caption"] == row.caption
        assert one["key"] == row.ref.key
        assert one["mean_logprob"] == row.mean_logprob
    assert data[0]["image"].size == (32, 24)


def annotate(tasks: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Do what a person in Label Studio does: submit each prediction, perhaps changed."""
    return [
        {
            **task,
            "annotations": [
                {
                    "id": number,
                    "completed_by": {"id": 1, "email": "ann@example.org"},
                    "updated_at": "2026-01-02T03:04:05Z",
                    "result": [
                        {**item, "value": {"text": [change(item["value"]["text"][0])]}}
                        for item in prediction["result"]
                    ],
                }
                for prediction in task["predictions"]
            ],
        }
        for number, task in enumerate(tasks)
    ]


def test_label_studio_and_back(own_job: Job, tmp_path: Path) -> None:
    dest = tmp_path / "tasks.json"
    export(ExportRequest(own_job.out, "label-studio", dest, tuple(own_job.shards)))
    tasks = json.loads(dest.read_text(encoding="utf-8"))
    assert "<TextArea" in (tmp_path / "tasks.config.xml").read_text()
    originals = images(own_job)
    for task in tasks:
        data = base64.b64decode(task["data"]["image"].partition(",")[2])
        assert data == originals[task["data"]["shard"], task["data"]["index"]]
    done_by_people = tmp_path / "done.json"
    changed = annotate(tasks, lambda text: f"{text} (seen)" if "dog" in text else text)
    done_by_people.write_text(json.dumps([*changed, tasks[0]]))
    done = import_label_studio(own_job.out, done_by_people)
    assert (done.num_answers, done.num_changed, done.num_skipped) == (31, 2, 2)
    assert import_label_studio(own_job.out, done_by_people).stored is None
    stored = pq.read_table(own_job.out / CORRECTIONS)
    assert set(stored.column("corrected_by").to_pylist()) == {"ann@example.org"}
    by_key = {row["key"]: row for row in stored.to_pylist()}
    for key, caption in HOSTILE.items():
        if caption and key != "plain":
            assert by_key[key]["corrected_caption"] == by_key[key]["caption"] == caption
    check_corrections_in_exports(own_job, tmp_path)


def check_corrections_in_exports(job: Job, folder: Path) -> None:
    for captions in (True, False):
        dest = folder / f"{captions}.jsonl"
        export(ExportRequest(job.out, "jsonl", dest, uses_corrections=captions))
        first = json.loads(dest.read_text(encoding="utf-8").splitlines()[0])
        assert first["caption"] == "a dog on a beach"
        assert first.get("corrected_caption") == ("a dog on a beach (seen)" if captions else None)
        text = folder / f"txt-{captions}"
        shards = tuple(job.shards)
        export(ExportRequest(job.out, "txt", text, shards, uses_corrections=captions))
        assert (text / "plain.txt").read_text().endswith("(seen)") == captions


def test_the_latest_correction_counts_and_the_others_stay(own_job: Job, tmp_path: Path) -> None:
    from jobs.corrections import all_corrections, latest_corrections

    row = captioned(own_job)[0]
    data = {"shard": row.ref.shard, "index": 0, "key": row.ref.key, "sha256": row.facts.sha256}
    for text, at in (("new", "2026-02-01"), ("old", "2026-01-01")):
        one = {**data, "caption": text, "annotator": 7, "annotation_id": 1, "updated_at": at}
        (tmp_path / "min.json").write_text(json.dumps([one]))
        import_label_studio(own_job.out, tmp_path / "min.json")
    assert {one.corrected_caption for one in all_corrections(open_folder(own_job.out))} == {
        "new",
        "old",
    }
    assert [
        one.corrected_caption for one in latest_corrections(open_folder(own_job.out)).values()
    ] == ["new"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "is no list"),
        (
            '[{"data": {}, "annotations": [{"result": [{"type": "textarea", "value": {"text": '
            '["x"]}}]}]}]',
            "was not made by",
        ),
        (
            '[{"data": {"shard": "s", "index": 0}, "annotations": [{"result": [{"type": "textarea",'
            ' "value": {"text": ["x"]}}]}]}]',
            "are of no row of OUT",
        ),
    ],
)
def test_what_is_no_file_of_this_job_is_refused(
    hostile_job: Job, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(RequestError, match=reason):
        import_label_studio(hostile_job.out, tmp_path / "wrong.json")


def test_urls_are_quoted(hostile_job: Job, exported: Exporter) -> None:
    options = ExportOptions(image_url="https://host/{shard}/{key}.jpg")
    tasks = json.loads(exported("label-studio", options=options).read_text(encoding="utf-8"))
    urls = {task["data"]["key"]: task["data"]["image"] for task in tasks}
    assert urls["<b>bold<b>"].endswith("/%3Cb%3Ebold%3Cb%3E.jpg")
    assert all("\x1b" not in url and " " not in url for url in urls.values())
    with pytest.raises(RequestError, match=r"no \{nothing\}"):
        exported("coco", options=ExportOptions(image_url="{nothing}.jpg"))


def test_filters(hostile_job: Job, tmp_path: Path) -> None:
    def count(**changes: Any) -> int:
        request = ExportRequest(hostile_job.out, "jsonl", tmp_path / "f", overwrite=True, **changes)
        return export(request).num_rows

    total = count()
    assert count(statuses=("error",)) == 2
    assert count(statuses=("ok", "truncated")) == total - 2
    assert count(where=("error = unreadable",)) == 1
    assert count(where=("width >= 32", "caption ~ dog")) == 2
    assert count(where=("caption !~ dog",)) == total - 2 - 2
    assert count(min_logprob=-10.0) == total - 2
    assert count(min_logprob=0.5) == 0
    logprobs = [row.mean_logprob or 0 for row in captioned(hostile_job)]
    assert count(where=("mean_logprob < -0.5",)) == sum(one < -0.5 for one in logprobs)
    for wrong in ("width", "nothing = 1", "width > wide", "caption ~ ((", ""):
        with pytest.raises(RequestError, match="--where"):
            count(where=(wrong,))


def test_an_empty_export_still_opens(exported: Exporter) -> None:
    none = ("width > 9999",)
    assert json.loads(exported("coco", where=none).read_text())["annotations"] == []
    assert json.loads(exported("label-studio", where=none).read_text()) == []
    assert pq.read_table(exported("parquet", where=none)).num_rows == 0
    with pytest.raises(RequestError, match="no row is wanted"):
        exported("hf", where=none)


def test_the_join_is_checked(own_job: Job, tmp_path: Path) -> None:
    """A shard packed anew under the same name, its pictures in another order."""
    make_shard(
        own_job.shards[1],
        [(f"{i:03d}.jpg", make_image_bytes(seed=300 - i)) for i in range(20)],
    )
    for to in ("jsonl", "coco", "txt", "hf"):
        with pytest.raises(ShardError, match="index 0 is not the row's image: image hash"):
            export(ExportRequest(own_job.out, to, tmp_path / "x", tuple(own_job.shards)))
    assert not list(tmp_path.glob("*x*"))


def test_nothing_is_replaced_that_was_not_made_here(hostile_job: Job, tmp_path: Path) -> None:
    shards = tuple(hostile_job.shards)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RequestError, match="is there already"):
            export(ExportRequest(hostile_job.out, "txt", mine, shards, overwrite=overwrite))
        with pytest.raises(RequestError, match="is there already"):
            export(ExportRequest(hostile_job.out, "jsonl", mine, overwrite=overwrite))
    made = tmp_path / "made"
    export(ExportRequest(hostile_job.out, "txt", made, shards))
    export(ExportRequest(hostile_job.out, "txt", made, shards, statuses=("ok",), overwrite=True))
    assert (made / MARK).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "made"}
    for dest in (hostile_job.out, hostile_job.out / "x", tmp_path / "no" / "folder"):
        with pytest.raises(RequestError, match="DEST"):
            export(ExportRequest(hostile_job.out, "jsonl", dest))


def test_pictures_that_cannot_be_opened_can_be_exported(exported: Exporter) -> None:
    folder = exported("txt", statuses=("error",))
    assert (folder / "broken.jpg").read_bytes() == b"\xff\xd8\xff no picture"


def test_a_format_that_needs_pictures_says_so(hostile_job: Job, tmp_path: Path) -> None:
    for to in ("webdataset", "txt", "hf", "label-studio"):
        with pytest.raises(RequestError, match="needs the pictures"):
            export(ExportRequest(hostile_job.out, to, tmp_path / "x"))


def test_a_full_disk_leaves_nothing(
    hostile_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jobs.export.jsonl.write", full)
    with pytest.raises(JobError, match="No space left"):
        export(ExportRequest(hostile_job.out, "jsonl", tmp_path / "x"))
    assert not list(tmp_path.iterdir())


def test_images_open_in_what_browsers_read(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "s.tar", [("a.bmp", make_image_bytes("BMP"))])
    out = make_output(tmp_path / "out", [shard])
    export(ExportRequest(out, "label-studio", tmp_path / "tasks.json", (shard,)))
    uri = json.loads((tmp_path / "tasks.json").read_text())[0]["data"]["image"]
    assert uri.startswith("data:image/png;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (32, 24)
