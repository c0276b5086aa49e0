"""The networks behind the seam of `pipeline.captioner`."""

from __future__ import annotations
