"""Shards in: which there are, who reads which, and the samples that each holds."""
