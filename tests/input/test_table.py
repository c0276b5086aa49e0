"""A Parquet file's rows become samples, one each, in order; and damage is told."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import tracemalloc
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import RequestError, SampleError, ShardError
from pipeline.fixtures import make_image_bytes, make_picture
from pipeline.images.opening import open_sample
from pipeline.input import table
from pipeline.input.checks import check_fields
from pipeline.input.reader import ReaderSettings, ShardStats, read_shard
from pipeline.input.shards import expand_shards, with_columns
from pipeline.prompts import PromptTemplate, kept_fields
from pipeline.records import Columns, Sample, Shard

IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
PICTURES = [make_image_bytes(seed=seed) for seed in range(12)]


def write(path: Path, columns: Mapping[str, pa.Array], **options: Any) -> Path:
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def images(count: int = 12, **more: list[object] | pa.Array) -> dict[str, pa.Array]:
    rows = [{"bytes": PICTURES[i % len(PICTURES)], "path": f"p/cat.{i}.jpg"} for i in range(count)]
    return {"image": pa.array(rows, IMAGE), **{name: pa.array(v) for name, v in more.items()}}


def read(
    path: Path,
    fields: set[str] | None = None,
    *,
    columns: Columns | None = None,
    skip: Container[int] = (),
    stats: ShardStats | None = None,
    **settings: Any,
) -> list[Sample]:
    shard = Shard("x", str(path), columns=columns or Columns())
    asked = ReaderSettings(frozenset(fields or ()), **settings)
    return list(read_shard(shard, asked, skip=skip, stats=stats))


def prompts(path: Path, template: str) -> list[str]:
    asked = PromptTemplate(template)
    return [asked.render(sample) for sample in read(path, set(asked.needs_fields))]


def test_rows_become_samples_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", images(), row_group_size=5)
    found = read(path)
    assert [sample.data for sample in found] == PICTURES
    assert [sample.ref.index for sample in found] == list(range(12))
    assert [sample.ref.key for sample in found] == [f"{i:08d}" for i in range(12)]
    assert [sample.ref.member for sample in found] == [f"p/cat.{i}.jpg" for i in range(12)]


def test_files_of_the_datasets_library_are_read(tmp_path: Path) -> None:
    """With its own image column beside another struct of bytes, and class names for numbers."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {
            "sound": [{"bytes": b"x", "path": None}] * 4,
            "picture": [make_picture(seed=i) for i in range(4)],
            "label": [1, 0, -1, 1],
            "title": ["one", "two", None, "four"],
        },
        features=datasets.Features(
            {
                "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
                "picture": datasets.Image(),
                "label": datasets.ClassLabel(names=["cat", "dog"]),
                "title": datasets.Value("string"),
            }
        ),
    )
    made.to_parquet(str(tmp_path / "x.parquet"))
    found = read(tmp_path / "x.parquet", {"label", "title", "json"})
    assert [open_sample(one)[0].tobytes() for one in found] == [
        make_picture(seed=i).tobytes() for i in range(4)
    ]
    assert [one.fields.get("label") for one in found] == [b"dog", b"cat", None, b"dog"]
    assert [one.ref.member for one in found][:2] == ["00000000.png", "00000001.png"]
    assert json.loads(found[2].fields["json"]) == {"label": None, "title": None}


def test_a_column_of_plain_bytes_of_any_width_is_read(tmp_path: Path) -> None:
    for kind in (pa.binary(), pa.large_binary()):
        path = write(tmp_path / "x.parquet", {"jpg": pa.array(PICTURES, kind)})
        assert [sample.data for sample in read(path)] == PICTURES
        assert read(path)[3].ref.member == "00000003.jpg"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (images(other=images()["image"]), "'image', 'other' may hold the images; choose one with"),
        ({"a": pa.array([b"x"]), "b": pa.array([b"y"])}, "'a', 'b' may hold the images"),
        ({"url": pa.array(["http://x"])}, "no column holds images .* it has 'url'"),
        ({"images": pa.array([[b"x"]])}, "'images' holds lists of images; wanted one image a row"),
        ({"images": pa.array([[]], pa.list_(IMAGE))}, "holds lists of images"),
    ],
)
def test_without_one_clear_column_of_images_the_request_is_wrong(
    tmp_path: Path, columns: dict[str, pa.Array], message: str
) -> None:
    shards = expand_shards([str(write(tmp_path / "x.parquet", columns))])
    with pytest.raises(RequestError, match=message):
        check_fields(shards, Columns(), frozenset())
    with pytest.raises(ShardError, match=message):
        list(read_shard(shards[0]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(image="nope"), "--image-column: no column 'nope'; it has 'image', 'n', 'f'"),
        (Columns(image="n"), "the column 'n' holds int64; wanted bytes"),
        (Columns(key="f"), "--key-column: 'f' holds double; wanted text or whole numbers"),
        (Columns(key="nope"), "--key-column: no column 'nope'"),
    ],
)
def test_a_column_that_does_not_fit_is_named(
    tmp_path: Path, columns: Columns, message: str
) -> None:
    path = write(tmp_path / "x.parquet", images(2, n=[1, 2], f=[0.5, 1.5]))
    shards = with_columns(expand_shards([str(path)]), columns)
    with pytest.raises(RequestError, match=message):
        check_fields(shards, columns, frozenset())


def test_a_field_that_is_no_column_is_told_before_a_row_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", images(2, title=["a", "b"]))
    shards = expand_shards([str(path)])
    check_fields(shards, Columns(), {"title", "json"})
    with pytest.raises(RequestError, match="no column 'tittle'; it has 'title'"):
        check_fields(shards, Columns(), {"tittle"})
    with pytest.raises(RequestError, match="are for Parquet files"):
        check_fields([Shard("x", "x.tar")], Columns(key="title"), frozenset())


def test_a_named_column_wins_over_what_the_schema_tells(tmp_path: Path) -> None:
    others = [make_image_bytes(seed=100 + i) for i in range(12)]
    path = write(tmp_path / "x.parquet", images(mask=others))
    assert [one.data for one in read(path, columns=Columns(image="mask"))] == others


def test_keys_come_from_a_column_of_text_or_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet", images(4, name=["a/b", None, "", "é"], number=[7, 8, 9, 10])
    )
    names = [one.ref.key for one in read(path, columns=Columns(key="name"))]
    assert names == ["a/b", "00000001", "00000002", "é"]
    numbers = [one.ref.key for one in read(path, columns=Columns(key="number"))]
    assert numbers == ["7", "8", "9", "10"]


def test_a_row_without_a_picture_is_an_error_row_that_says_why(tmp_path: Path) -> None:
    """A path in a row opens nothing, even where the file is there."""
    (tmp_path / "secret.jpg").write_bytes(PICTURES[0])
    rows = [
        None,
        {"bytes": None, "path": None},
        {"bytes": b"", "path": "a.jpg"},
        {"bytes": None, "path": str(tmp_path / "secret.jpg")},
        {"bytes": None, "path": "secret.jpg"},
        {"bytes": b"no picture", "path": "a.jpg"},
        {"bytes": PICTURES[1], "path": None},
    ]
    path = write(tmp_path / "x.parquet", {"image": pa.array(rows, IMAGE)})
    codes = []
    for sample in read(path):
        try:
            open_sample(sample)
            codes.append("ok")
        except SampleError as error:
            codes.append(error.code)
    assert codes == ["empty", "empty", "empty", "link", "link", "unreadable", "ok"]
    assert all(sample.data == b"" for sample in read(path)[:5])
    plain = write(tmp_path / "y.parquet", {"jpg": pa.array([None, b"", PICTURES[0]])})
    assert [one.fault.code if one.fault else "" for one in read(plain)] == ["empty", "empty", ""]


def test_an_image_over_the_limit_costs_its_row_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"jpg": pa.array([b"x" * 100, PICTURES[0][:50]])})
    found = read(path, max_member_bytes=60)
    assert [one.fault.code if one.fault else "" for one in found] == ["too_large", ""]
    assert found[0].data == b""


def test_columns_are_fields_of_prompts_and_kept_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet",
        images(2, Title=["a\nb", "c"], meta=[{"tags": ["x"], "n": 1}, {"tags": ["y"], "n": None}]),
    )
    assert prompts(path, "{title}: {json.meta.tags.0}{json.Title}")[0] == "a b: xa b"
    assert prompts(path, "{meta}")[1] == '{"tags": ["y"], "n": null}'
    with pytest.raises(SampleError, match="missing_field"):
        prompts(path, "{json.meta.n}")
    kept = [kept_fields(one, ["title", "json.meta.n"]) for one in read(path, {"title", "json"})]
    assert kept == [{"title": "a\nb", "json.meta.n": "1"}, {"title": "c", "json.meta.n": None}]


def test_a_column_called_json_is_the_field_json(tmp_path: Path) -> None:
    """So files that were made from WebDataset tars keep their meaning."""
    path = write(tmp_path / "x.parquet", images(1, json=[{"title": "in it"}], title=["beside"]))
    assert prompts(path, "{json.title} {title}") == ["in it beside"]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([1, -2], pa.int8()), ["1", "-2"]),
        (pa.array([2**64 - 1, 0], pa.uint64()), [str(2**64 - 1), "0"]),
        (pa.array([0.5, 1e300]), ["0.5", "1e+300"]),
        (pa.array([decimal.Decimal("1.50"), decimal.Decimal("0.00")]), ["1.50", "0.00"]),
        (pa.array([datetime.date(2024, 5, 1)] * 2), ["2024-05-01"] * 2),
        (pa.array([1, 1_000_000_001], pa.timestamp("ns")), ["1970-01-01T00:00:00", None]),
        (pa.array([datetime.time(12, 30)] * 2), ["12:30:00"] * 2),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array([[1, None], []]), ["[1, null]", "[]"]),
        (pa.array([{"a": [1.5]}, {"a": None}]), ['{"a": [1.5]}', '{"a": null}']),
    ],
)
def test_typed_values_become_sensible_text(
    tmp_path: Path, values: pa.Array, wanted: list[str | None]
) -> None:
    path = write(tmp_path / "x.parquet", images(2, v=values))
    for text, expected in zip(prompts(path, "{v}"), wanted, strict=True):
        assert expected is None or text == expected


def test_what_is_no_json_number_or_no_text_costs_no_row(tmp_path: Path) -> None:
    broken = pa.array([b"\xff\xfe", b"ok"]).cast(pa.string(), safe=False)
    deep = pa.StructArray.from_arrays([broken], ["a"])
    path = write(
        tmp_path / "x.parquet", images(2, v=broken, d=deep, f=[float("nan"), float("inf")])
    )
    found = read(path, {"json", "v"})
    assert json.loads(found[1].fields["json"]) == {"v": "ok", "d": {"a": "ok"}, "f": None}
    assert json.loads(found[0].fields["json"])["v"] == "\\xff\\xfe"
    with pytest.raises(SampleError, match="bad_field: v is not UTF-8"):
        PromptTemplate("{v}").render(found[0])


def test_columns_of_bytes_are_left_out_of_json(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", images(1, mask=[{"bytes": b"x"}], n=[1]))
    found = read(path, {"json"}, columns=Columns(image="image"))
    assert json.loads(found[0].fields["json"]) == {"n": 1}


def test_skipped_row_groups_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", images(), row_group_size=3, compression="none")
    stats, all_stats = ShardStats(), ShardStats()
    found = read(path, skip=frozenset({*range(9), 11}), stats=stats)
    assert [one.ref.index for one in found] == [9, 10]
    assert (stats.num_images, stats.num_samples, stats.num_skipped) == (12, 2, 10)
    read(path, stats=all_stats)
    assert all_stats.bytes_read - stats.bytes_read > sum(map(len, PICTURES[:9]))
    assert read(path, skip=range(100)) == []


def test_memory_is_bounded_in_a_large_row_group(tmp_path: Path) -> None:
    """One row group of 96 MB is read page by page: at most a few MB of it are held at once."""
    picture = random.Random(0).randbytes(96 << 10)
    rows = pa.array([picture[i % 7 :] for i in range(1000)])
    path = write(
        tmp_path / "x.parquet",
        {"jpg": rows},
        compression="none",
        use_dictionary=False,
        write_batch_size=8,
    )
    del rows
    assert pq.ParquetFile(path).num_row_groups == 1
    before = pa.total_allocated_bytes()
    most = num_bytes = 0
    tracemalloc.start()
    try:
        for sample in read_shard(Shard("x", str(path))):
            num_bytes += len(sample.data)
            most = max(most, pa.total_allocated_bytes() - before)
        assert num_bytes > 90 << 20
        assert most < 40 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_cut_at_any_byte_is_told_from_a_whole_one(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.parquet", {"jpg": pa.array([b"abc", b"def"] * 5)}).read_bytes()
    path = tmp_path / "cut.parquet"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ShardError, match=r"cut|empty|no Parquet|footer"):
            read(path)
    path.write_bytes(whole)
    assert len(read(path)) == 10


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"ustar" * 1000)
    with pytest.raises(ShardError, match="no Parquet file: it begins with b'usta'"):
        read(path)


def test_rows_before_a_damage_are_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet",
        images(),
        row_group_size=4,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        write_statistics=False,
    )
    data = bytearray(path.read_bytes())
    place = data.index(PICTURES[9])
    data[place + 100] ^= 0xFF
    path.write_bytes(data)
    samples = read_shard(Shard("x", str(path)))
    assert [next(samples).data for _ in range(8)] == PICTURES[:8]
    with pytest.raises(ShardError, match=r"damaged in row group 2, after row 8: .*CRC"):
        next(samples)


def test_a_flipped_bit_never_raises_anything_but_a_shard_error(tmp_path: Path) -> None:
    checked: dict[str, Any] = {"row_group_size": 2, "write_page_checksum": True}
    path = write(tmp_path / "x.parquet", images(6, t=list("abcdef")), **checked)
    whole = path.read_bytes()
    rng = random.Random(1)
    num_told = 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            assert len(read(path, {"json"})) == 6
        except ShardError:
            num_told += 1
    assert num_told > 50


def test_the_look_before_the_job_reads_the_footer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", images())
    monkeypatch.setattr(table.pq.ParquetFile, "iter_batches", None)
    check_fields(expand_shards([str(path)]), Columns(), frozenset())


def test_a_damaged_first_file_is_left_to_its_turn(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_bytes(b"PAR1")
    write(tmp_path / "1.parquet", {"url": pa.array(["x"])})
    shards = expand_shards([str(tmp_path / "*.parquet")])
    with pytest.raises(RequestError, match=r"1\.parquet: no column holds images"):
        check_fields(shards, Columns(), frozenset())
    check_fields(shards[:1], Columns(), frozenset())
