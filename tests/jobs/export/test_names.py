"""Keys become file names that stay in their folder, and no two keys the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.export.names import Names, safe_path
from tests.jobs.outputs import HOSTILE


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("00000", "00000"),
        ("a/b/c", "a/b/c"),
        ("a.b.c", "a.b.c"),
        ("../../etc/passwd", "etc/passwd"),
        ("/absolute", "absolute"),
        ("..", "_"),
        ("a\x00b\nc", "a_b_c"),
        (".hidden", "x.hidden"),
        ("_private/x", "x_private/x"),
        ('<a href="x">', "x_a href=_x__"),
        ("\u202eevil", "x_evil"),
        ("trailing. ", "trailing"),
        ("émoji 中文", "émoji 中文"),
    ],
)
def test_examples(key: str, name: str) -> None:
    assert safe_path(key, keeps_dots=True) == name


def test_readers_of_tars_see_the_whole_key() -> None:
    assert safe_path("folder.x/a.b.c", keeps_dots=False) == "folder.x/a_b_c"


def test_no_two_keys_share_a_name_not_even_on_other_file_systems() -> None:
    names = Names()
    assert [names.name(key) for key in ("a", "A", "a", "../a", "b")] == [
        *("a", "A-2", "a-3", "a-4", "b"),
    ]


@given(st.lists(st.text() | st.sampled_from(list(HOSTILE)), max_size=8), st.booleans())
def test_any_key_at_all(keys: list[str], keeps_dots: bool) -> None:
    names = Names(keeps_dots)
    found = [names.name(key) for key in keys]
    assert len({name.casefold() for name in found}) == len(found)
    for name in found:
        path = Path("/root/folder") / name
        assert path.resolve().is_relative_to("/root/folder")
        assert path.resolve() != Path("/root/folder")
        assert all(len(part.encode()) < 230 for part in path.parts)
        assert name.isprintable()
        if not keeps_dots:
            assert "." not in name.rpartition("/")[2]
