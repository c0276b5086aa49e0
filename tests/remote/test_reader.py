"""What arrives from a store is exactly the object's bytes, or a ShardError says why not."""

from __future__ import annotations

import io
import random
import re
from base64 import b64encode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import ShardError
from pipeline.remote.reader import open_remote
from tests.remote.fault_server import Fault, Store, serving

pytest.importorskip("urllib3")

DATA = random.Random(7).randbytes(300_000)
PAST = "at byte {} of 300000"


def read(url: str) -> bytes:
    with io.BufferedReader(open_remote(url), 1 << 16) as file:
        return file.read()


def put(store: Store, data: bytes = DATA, path: str = "/bucket/a.tar") -> str:
    store.objects[path] = data
    return f"{store.url}{path}"


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest, store: Store) -> str:
    """The same object by either scheme."""
    where = put(store)
    if request.param == "http":
        return where
    pytest.importorskip("boto3")
    request.getfixturevalue("account")
    return "s3://bucket/a.tar"


def test_a_whole_object_takes_one_request_beside_the_look_at_it(store: Store, url: str) -> None:
    assert read(url) == DATA
    assert len(store.asked) == 2


@pytest.mark.parametrize("kind", ["cut", "reset", "stall"])
def test_a_broken_connection_is_resumed_where_it_broke(store: Store, url: str, kind: str) -> None:
    store.schedule = [None, Fault(kind, 70_000), Fault(kind, 0), Fault(kind, 100_000)]
    assert read(url) == DATA
    begins = [int(asked[1]) for one in store.asked if (asked := re.search(r"bytes=(\d+)-$", one))]
    if kind == "cut":
        assert begins == [70_000, 70_000, 170_000]
    assert len(begins) == 3  # but a reset or a stall may take with it some of what has come


def test_busy_answers_are_waited_out(store: Store, url: str) -> None:
    busy = Fault("status", status=503, headers=("Retry-After: 0",))
    store.schedule = [busy, Fault("status", status=500), None, busy, Fault("status", status=429)]
    assert read(url) == DATA


def test_a_store_that_never_gives_more_is_given_up_and_named(store: Store, url: str) -> None:
    store.schedule = [None, Fault("cut", 70_000), *[Fault("cut", 0)] * 9]
    with pytest.raises(ShardError) as caught:
        read(url)
    assert caught.value.shard == url
    assert "attempt 4 of 4" in caught.value.detail
    assert PAST.format(70_000) in caught.value.detail


def test_an_object_that_changes_midway_is_an_error_that_says_so(store: Store, url: str) -> None:
    store.schedule = [None, Fault("cut", 70_000), Fault("replace")]
    with pytest.raises(ShardError, match="the object changed while it was read; a rerun") as caught:
        read(url)
    assert PAST.format(70_000) in caught.value.detail


def test_an_object_that_changed_since_it_was_looked_at_is_an_error(store: Store, url: str) -> None:
    version = open_remote(url).version
    put(store, DATA[::-1])
    with pytest.raises(ShardError, match="changed between two looks"):
        open_remote(url, stamp=version.stamp)


@pytest.mark.parametrize(
    ("status", "message"), [(404, "404"), (403, "403 (Forbidden )?AccessDenied"), (401, "401")]
)
def test_a_refusal_is_not_asked_again(store: Store, url: str, status: int, message: str) -> None:
    store.schedule = [Fault("status", status=status)]
    with pytest.raises(ShardError, match=message):
        read(url)
    assert len(store.asked) == 1


def test_half_a_header_is_not_taken_for_one(store: Store, url: str) -> None:
    """A cut behind `ETag: "5d` would be another version, behind `Content-Length: 30` a size."""
    store.schedule = [Fault("beheaded", after=n) for n in (20, 40, 50, 60, 70, 80, 90)]
    store.schedule = [one for fault in store.schedule for one in (fault, None)]
    for _ in range(4):
        assert read(url) == DATA
    assert not store.schedule


def test_a_missing_object_is_an_error_that_names_it(store: Store, url: str) -> None:
    store.objects.clear()
    with pytest.raises(ShardError, match="404") as caught:
        read(url)
    assert caught.value.shard == url


def test_an_empty_object_is_empty(store: Store, url: str) -> None:
    put(store, b"")
    assert read(url) == b""


def test_a_jump_is_a_new_request_only_where_it_is_far(store: Store, url: str) -> None:
    data = DATA * 10
    put(store, data)
    with open_remote(url) as file:
        assert file.read(10) == data[:10]
        asked = len(store.asked)
        file.seek(500_000)
        assert file.read(10) == data[500_000:500_010]
        assert len(store.asked) == asked
        file.seek(-5, io.SEEK_END)
        assert file.read() == data[-5:]
        file.seek(3)
        assert file.read(4) == data[3:7]
        assert file.tell() == 7
        assert len(store.asked) == asked + 2


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_under_any_schedule_the_bytes_are_the_objects_or_a_shard_error(
    data: st.DataObject,
) -> None:
    after = st.integers(0, len(DATA))
    hurt = st.builds(Fault, st.sampled_from(["cut", "reset", "chunks", "torn"]), after)
    beheaded = st.builds(Fault, st.just("beheaded"), st.integers(0, 250))
    status = st.builds(Fault, st.just("status"), after, st.sampled_from([404, 429, 500, 503]))
    other = st.builds(Fault, st.sampled_from(["replace", "page"]))
    schedule = data.draw(st.lists(st.none() | hurt | hurt | status | other | beheaded, max_size=8))
    store = Store({"/a.tar": DATA}, list(schedule))
    for what in ("has_ranges", "has_etags", "has_length", "is_chunked"):
        setattr(store, what, data.draw(st.booleans(), what))
    kinds = {fault.kind for fault in schedule if fault}
    with serving(store):
        try:
            got = read(f"{store.url}/a.tar")
        except ShardError:
            return
    if not store.has_etags and "replace" in kinds:
        return  # nobody could tell
    if store.has_ranges or (store.has_length and not store.is_chunked and "chunks" not in kinds):
        assert got in (DATA, DATA[::-1])
    else:  # a short reply in good form from a server that never told the length
        assert DATA.startswith(got) or DATA[::-1].startswith(got)


def test_the_law_is_put_to_the_test_by_servers_that_break_and_recover(store: Store) -> None:
    """The law above would hold too if every read failed."""
    url = put(store)
    store.schedule = [None, *[Fault(kind, 90_000) for kind in ("torn", "chunks", "cut")]]
    assert read(url) == DATA
    assert not store.schedule


def test_a_server_without_ranges_is_read_anew_up_to_where_it_broke(store: Store) -> None:
    url = put(store)
    store.has_ranges = False
    store.schedule = [None, Fault("cut", 200_000), Fault("cut", 100_000)]
    assert read(url) == DATA


def test_a_server_that_tells_no_length_is_refused_unless_its_end_is_marked(store: Store) -> None:
    url = put(store)
    store.has_ranges, store.has_length = False, False
    with pytest.raises(ShardError, match="does not tell its length; wanted a Content-Length"):
        read(url)
    store.is_chunked = True
    assert read(url) == DATA
    store.schedule = [None, Fault("torn", 100_000)]
    assert read(url) == DATA
    store.has_etags = False
    store.schedule = [None, Fault("torn", 100_000)]
    with pytest.raises(ShardError, match="a server that tells no version resumes not"):
        read(url)


def test_a_web_page_is_no_shard(store: Store) -> None:
    url = put(store)
    store.schedule = [Fault("page")]
    with pytest.raises(ShardError, match="a web page came, not a shard"):
        read(url)


def test_a_trickle_counts_as_a_stall(store: Store) -> None:
    url = put(store)
    store.schedule = [None, *[Fault("trickle", 1000)] * 4]
    with pytest.raises(ShardError, match=r"it trickles \(\d+ bytes a second\).*attempt 4 of 4"):
        read(url)


def to(where: str) -> Fault:
    return Fault("redirect", headers=(f"Location: {where}",))


def test_redirects_are_followed_but_not_in_circles_nor_elsewhere(store: Store) -> None:
    url = put(store)
    store.schedule = [to("/bucket/a.tar"), None, to(url), to(url)]
    assert read(url) == DATA
    store.schedule = [to(url)] * 6
    with pytest.raises(ShardError, match="more than 5 redirects"):
        read(url)
    store.schedule = [to("file:///etc/passwd")]
    with pytest.raises(ShardError, match="a redirect to file://"):
        read(url)


def test_a_password_goes_to_its_own_server_only_and_is_not_told(store: Store) -> None:
    put(store)
    store.password = f"Basic {b64encode(b'me:p@ss').decode()}"
    url = store.url.replace("//", "//me:p%40ss@") + "/bucket/a.tar"
    assert read(url) == DATA
    store.password = "another"
    with pytest.raises(ShardError, match="401") as caught:
        read(url)
    assert "p%40ss" not in str(caught.value)
    with serving(Store({"/b.tar": DATA})) as elsewhere:
        store.password = f"Basic {b64encode(b'me:p@ss').decode()}"
        elsewhere.password = "nothing"
        store.schedule = [to(f"{elsewhere.url}/b.tar")]
        with pytest.raises(ShardError, match="401"):
            read(url)


def test_a_host_that_is_not_there_is_asked_again_and_named(store: Store) -> None:
    with serving(Store()) as gone:
        url = f"{gone.url}/a.tar?token=s3cr3t"
    with pytest.raises(ShardError, match="the server cannot be reached, attempt 4 of 4") as caught:
        read(url)
    assert "s3cr3t" not in str(caught.value)


def test_each_retry_is_told_as_it_happens(store: Store) -> None:
    url = put(store)
    told: list[str] = []
    store.schedule = [None, Fault("cut", 70_000)]
    with open_remote(f"{url}?sig=s3cr3t", note=told.append) as file:
        while file.read(65536):
            pass
    assert told == [f"{url}: the connection ended early at byte 70000 of 300000, attempt 1 of 4"]


def test_failures_are_forgiven_by_progress_so_a_large_shard_outlives_many(store: Store) -> None:
    data = DATA * 30
    url = put(store, data)
    store.schedule = [None, *[Fault("cut", 1_100_000)] * 7]
    assert read(url) == data
    assert not store.schedule
