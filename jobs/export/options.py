"""What some formats can be told beside which rows to take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RequestError
from pipeline.prompts import PromptTemplate


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Each is used by the formats that its comment names."""

    field: str = "txt"  # webdataset: the caption's member is KEY.FIELD
    replace: bool = False  # webdataset: drop a member that has this name already
    with_images: bool = True  # txt: the pictures beside the captions
    image_url: str = ""  # label-studio, coco: a template such as https://host/{key}.jpg
    table: Path | None = None  # parquet: the table to join into
    on: str = "key"  # parquet: the column that both have

    def __post_init__(self) -> None:
        if not self.field or "/" in self.field or self.field.startswith("."):
            raise RequestError(f"--field is {self.field!r}; wanted a name such as txt")
        if self.image_url:
            PromptTemplate(self.image_url)  # raises for a brace that has no partner
