"""The families of networks that `--model` can name, for people to choose from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One line of `captionjob models`."""

    name: str
    backend: str
    summary: str
    example: str  # what to give to --model


FAMILIES: tuple[Family, ...] = (
    Family(
        "default",
        "native",
        "built in: short captions of photographs, 16 MB, no download",
        "default",
    ),
)
