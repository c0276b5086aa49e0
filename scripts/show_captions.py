"""Print picture -> caption of an output folder of captionjob: `show_captions.py captions`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq

from jobs.terminal import printable


def main(folder: Path) -> None:
    """Print all finished shards' rows, in order."""
    paths = sorted(folder.glob("*.parquet"))
    columns = ["member", "caption", "error", "error_detail"]
    rows = [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]
    width = max((len(row["member"]) for row in rows), default=0)
    for row in rows:
        text = row["caption"] if row["error"] is None else f"[{row['error']}] {row['error_detail']}"
        print(f"{printable(row['member']).ljust(width)} -> {printable(text or '')}")
    print(f"\nthe Parquet files: {', '.join(str(path) for path in paths)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
