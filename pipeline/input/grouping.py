"""Members that stand together become samples: which field belongs to which image.

    a.json  a.jpg  a.txt │ b.jpg  b.png  b.txt │ c.1.jpg │ c.2.jpg  c.2.txt
    └ loose └ image      │ two images, one key │         └ another key: the last dot counts

A group is the images of one key with its fields. Fields met before their image are *loose*;
there is room for a few, and one whose image never comes is junk. Memory is bounded: a group
that grows too large hands on its images with the fields they have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipeline.errors import SampleError

MAX_LOOSE = 64
MAX_LOOSE_BYTES = 64 << 20
MAX_GROUP_FIELDS = 256
MAX_GROUP_IMAGES = 16
MAX_GROUP_BYTES = 256 << 20


@dataclass(slots=True)
class Image:
    """An image member on its way to become a Sample; its fields may still come."""

    index: int
    key: str
    member: str
    data: bytes
    fault: SampleError | None
    is_wanted: bool
    fields: dict[str, bytes] = field(default_factory=dict)


class Group:
    """The images of one key, as long as more of it may come."""

    def __init__(self, junk: Counter[str]) -> None:
        """Count in `junk` the fields that no image wants."""
        self.key: str | None = None
        self._images: list[Image] = []
        self._names: set[str] = set()  # members of this group, images and fields
        self._fields: dict[str, bytes | None] = {}
        self._has_field_after_image = False
        self._loose: dict[str, bytes | None] = {}  # member name -> data, None if not asked for
        self._claimed: set[str] = set()  # of the loose ones, those that the group has as well
        self._junk = junk

    def add_image(self, image: Image) -> list[Image]:
        """Add an image; return those of the group that it shows to be complete."""
        done: list[Image] = []
        begins = f"{image.key}."
        is_same = image.key == self.key
        mine = {
            name: data
            for name, data in self._loose.items()
            if name.startswith(begins) and not (is_same and name in self._claimed)
        }
        comes_again = image.member in self._names and (self._has_field_after_image or bool(mine))
        if not is_same or comes_again or self._is_large():
            done = self._close()
            self.key = image.key
        for name, data in mine.items():
            del self._loose[name]
            self._claimed.discard(name)
            self._keep(name, data)
        self._drop_loose()
        self._images.append(image)
        self._names.add(image.member)
        return done

    def add_field(self, name: str, data: bytes | None) -> list[Image]:
        """Add a member that is no image; it closes nothing, for its image may be on either side."""
        is_mine = self.key is not None and name.startswith(f"{self.key}.")
        if is_mine and name not in self._names and self._has_room(data):
            self._keep(name, data)
            self._has_field_after_image = True
            self._claimed.add(name)
        # `a.b.txt` after `a.jpg` may also be the `txt` of an `a.b.jpg` that is still to come.
        self._loose[name] = data
        self._bound_loose()
        return []

    def finish(self) -> list[Image]:
        """Return what is left, at the end of the shard."""
        done = self._close()
        self._drop_loose()
        self.key = None
        return done

    def _keep(self, name: str, data: bytes | None) -> None:
        assert self.key is not None
        self._names.add(name)
        self._fields.setdefault(name[len(self.key) + 1 :].lower(), data)

    def _close(self) -> list[Image]:
        kept = {name: data for name, data in self._fields.items() if data is not None}
        for image in self._images:
            image.fields = kept
        done = self._images
        self._images, self._names, self._fields = [], set(), {}
        self._has_field_after_image = False
        return done

    def has_ended_before(self, name: str | None) -> bool:
        """Whether no more fields can come, `name` being the member that is being read, if any."""
        names = [*self._loose] if name is None else [*self._loose, name]
        return any(not one.startswith(f"{self.key}.") for one in names)

    def _has_room(self, data: bytes | None) -> bool:
        held = sum(len(one or b"") for one in self._fields.values()) + len(data or b"")
        return len(self._fields) < MAX_GROUP_FIELDS and held < MAX_GROUP_BYTES

    def _is_large(self) -> bool:
        held = sum(len(image.data) for image in self._images)
        return len(self._images) >= MAX_GROUP_IMAGES or held >= MAX_GROUP_BYTES

    def _bound_loose(self) -> None:
        """Forget the oldest loose fields: what is far from its image is not found again."""
        held = sum(len(data or b"") for data in self._loose.values())
        while len(self._loose) > MAX_LOOSE or (held > MAX_LOOSE_BYTES and len(self._loose) > 1):
            name = next(iter(self._loose))
            held -= len(self._loose.pop(name) or b"")
            self._forget(name)

    def _drop_loose(self) -> None:
        for name in self._loose:
            self._forget(name)
        self._loose = {}
        self._claimed.clear()

    def _forget(self, name: str) -> None:
        if name not in self._claimed:
            self._junk["field without an image"] += 1
        self._claimed.discard(name)
