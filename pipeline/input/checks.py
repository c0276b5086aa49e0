"""What can be known of the shards before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence, Set

from pipeline.errors import RequestError, ShardError
from pipeline.input.folder import FIELD_EXTENSIONS
from pipeline.input.shards import is_table
from pipeline.records import Columns, Shard

MAX_LOOKS = 3  # at files that turn out to be damaged, which is told when their turn comes


def check_fields(shards: Sequence[Shard], columns: Columns, fields: Set[str]) -> None:
    """Look at the columns of the first Parquet file that can be opened.

    Raises RequestError where it has no clear column of images, or lacks one that is asked for,
    and where columns are named and there is no Parquet file. Pictures in a folder have the
    fields of two extensions, and no others.
    """
    foreign = sorted(fields - set(FIELD_EXTENSIONS))
    folders = [shard.folder for shard in shards if shard.folder is not None]
    if foreign and folders:
        raise RequestError(
            f"--shards: {folders[0]} is a folder of pictures, which have the fields "
            f"{' and '.join(FIELD_EXTENSIONS)}, not {foreign[0]!r}"
        )
    tables = [shard for shard in shards if is_table(shard)]
    if columns != Columns() and not tables:
        raise RequestError(
            "--image-column and --key-column are for Parquet files; --shards names none"
        )
    for shard in tables[:MAX_LOOKS]:
        from pipeline.input.columns import ColumnError
        from pipeline.input.table import check_columns

        try:
            check_columns(shard, fields)
        except ColumnError as error:
            raise RequestError(f"--shards: {error}") from error
        except ShardError:
            continue
        return
