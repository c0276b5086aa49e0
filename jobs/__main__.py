"""`python -m jobs` is `captionjob`."""

from __future__ import annotations

from jobs.cli import main

main()
