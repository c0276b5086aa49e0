"""Rows out: pieces, one Parquet file a shard, and what an output folder holds already."""
