"""Stages of batch image captioning, from shards to rows."""
