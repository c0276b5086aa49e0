"""`compare` as the command line has it: a table for people, JSON, and the page."""

from __future__ import annotations

from pathlib import Path

from jobs.compare.make import Compared, CompareRequest, compare, kinds_of
from jobs.report.page import render
from jobs.terminal import bytes_text, plural, printable
from pipeline.errors import RequestError
from pipeline.records import STATUSES

SORTS = [
    ("overlap", "most different first"),
    ("-overlap", "most alike first"),
    ("key", "by key"),
]


def print_comparison(request: CompareRequest, to: Path | None, *, as_json: bool) -> None:
    """Compare, print the numbers, and write the page if there are shards to take pictures from."""
    if to is not None and not request.shards:
        raise RequestError("--to needs the pictures: name their --shards")
    if to is not None and (to.is_dir() or not to.absolute().parent.is_dir()):
        raise RequestError(f"--to {str(to)!r}: wanted a file in a folder that exists")
    compared = compare(request)
    if as_json:
        print(compared.to_json())
    else:
        for line in comparison_lines(compared):
            print(printable(line))
    if to is not None:
        num_bytes = write_comparison(compared, to)
        if not as_json:
            print(printable(f"({bytes_text(num_bytes)}) -> {to}"))


def comparison_lines(compared: Compared) -> list[str]:
    """Return the numbers as lines."""
    sums = compared.sums
    share = sums.num_same / sums.num_pairs
    lines = [
        f"A  {compared.a.folder.url} ({compared.a.model})",
        f"B  {compared.b.folder.url} ({compared.b.model})",
        *(f"   {one}" for one in compared.settings),
        "",
        f"{plural(sums.num_pairs, 'row')} of the same images: {sums.num_same:,} the same "
        f"({share:.1%}), words in common {sums.mean_overlap:.1%}",
    ]
    for name, count in (("A", sums.only_a), ("B", sums.only_b)):
        if count:
            lines.append(f"{plural(count, 'row')} in {name} alone")
    table = [("", "A", "B"), *compared.measures()]
    widths = [max(len(row[place]) for row in table) for place in range(3)]
    lines.append("")
    for name, a, b in table:
        lines.append(f"{name.ljust(widths[0])}  {a.rjust(widths[1])}  {b.rjust(widths[2])}")
    return lines


def write_comparison(compared: Compared, to: Path) -> int:
    """Write the page with both captions under each picture; return its bytes."""
    from jobs.report.make import details_of, settings_of, write_page
    from jobs.report.thumbnails import make_thumbnails

    assert compared.join is not None
    shown = compared.sums.shown()
    thumbnails = make_thumbnails(compared.join.pairs, [pair.a for pair, _ in shown])
    cards = [
        {
            "pair": pair,
            "kinds": kinds,
            "uri": thumbnails.uris.get((pair.a.ref.shard, pair.a.ref.index), ""),
            "references": compared.references.get((pair.a.ref.shard, pair.a.ref.index), []),
            "details": [
                *(("A " + name, value) for name, value in details_of(pair.a)),
                *(("B " + name, value) for name, value in details_of(pair.b)),
            ],
        }
        for pair, kinds in shown
    ]
    page = render(
        "compare.html",
        title=f"{compared.a.folder.title} and {compared.b.folder.title}",
        compared=compared,
        sums=compared.sums,
        measures=compared.measures(),
        differences=compared.settings,
        notes=[f"some pictures are missing: {note}" for note in thumbnails.notes],
        kinds=kinds_of(compared),
        statuses=[one for one in STATUSES if any(pair.a.status == one for pair, _ in shown)],
        sorts=SORTS,
        cards=cards,
        settings=settings_of(compared.a),
    )
    return write_page(to, page)
