"""Prefill, KV cache, decode loop and scheduling; knows no file and no text."""
