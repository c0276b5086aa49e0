"""The S3 client: where it looks, how it asks, what a failure means; no store is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pipeline.errors import RequestError
from pipeline.remote.faults import RemoteError
from pipeline.remote.patience import Patience
from pipeline.remote.s3 import connect, split_url

botocore_exceptions = pytest.importorskip("botocore.exceptions")


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide whatever account this machine has."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-of-somebody")


def signed() -> str:
    """Return where a GET of `a/b.tar` in `bucket` would go, signed or not."""
    client = connect().client
    return str(client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "a/b.tar"}))


@pytest.mark.usefixtures("signer")
def test_a_bucket_stands_in_the_host_at_amazon_and_in_the_path_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert re.match(r"https://bucket\.s3[a-z0-9.-]*\.amazonaws\.com/a/b\.tar\?", signed())
    assert "AWS4-HMAC-SHA256" in signed()
    assert "eu-west-1" in signed()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    assert signed().startswith("http://localhost:9000/bucket/a/b.tar?")


@pytest.mark.usefixtures("signer")
def test_a_profile_may_put_the_bucket_back_into_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(
        "[default]\nendpoint_url = http://store.test\ns3 =\n    addressing_style = virtual\n"
    )
    assert signed().startswith("http://bucket.store.test/a/b.tar?")


def test_without_credentials_requests_go_unsigned_and_a_refusal_says_so() -> None:
    store = connect()
    assert not store.is_signed
    assert "Signature" not in signed()
    fault = store.fault_of(answer(403, "AccessDenied"))
    assert fault.kind == "denied"
    assert "no credentials were found" in fault.what


@pytest.mark.usefixtures("signer")
def test_one_client_serves_the_process_until_the_account_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert connect() is connect()
    assert connect(attempts=4) is not connect()
    before = connect()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert connect() is not before


@pytest.mark.usefixtures("signer")
def test_time_outs_and_attempts_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPTIONJOB_STALL_SECONDS", "7")
    config = connect(attempts=3).client.meta.config
    assert (config.read_timeout, config.connect_timeout) == (7.0, 2.0)
    assert config.retries["total_max_attempts"] == 3


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "1e9"])
def test_a_time_out_that_is_no_number_is_refused_by_name(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPTIONJOB_STALL_SECONDS", value)
    with pytest.raises(RequestError, match=r"CAPTIONJOB_STALL_SECONDS='.*' ?: wanted a number"):
        connect()


def test_a_missing_boto3_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("AWS_REGION", "a-region-of-this-test")
    with pytest.raises(RequestError, match=r"pip install 'captionjob\[s3\]'"):
        connect()


def test_a_profile_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(RequestError, match=r"profile \(nobody\) could not be found"):
        connect()


def answer(status: int, code: str = "", operation: str = "GetObject") -> Exception:
    told = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = botocore_exceptions.ClientError(told, operation)
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(404, "NoSuchKey"), "missing"),
        (answer(404), "missing"),
        (answer(403), "denied"),
        (answer(403, "SignatureDoesNotMatch"), "denied"),
        (answer(400, "ExpiredToken"), "denied"),
        (answer(503, "SlowDown"), "transient"),
        (answer(500), "transient"),
        (answer(400, "RequestTimeout"), "transient"),
        (answer(412, "PreconditionFailed"), "changed"),
        (answer(412, "PreconditionFailed", "PutObject"), "exists"),
        (answer(409, "ConditionalRequestConflict", "PutObject"), "transient"),
        (answer(416, "InvalidRange"), "refused"),
        (botocore_exceptions.NoCredentialsError(), "denied"),
        (botocore_exceptions.EndpointConnectionError(endpoint_url="http://x"), "transient"),
        (botocore_exceptions.ReadTimeoutError(endpoint_url="http://x"), "transient"),
        (ConnectionResetError(), "transient"),
    ],
)
@pytest.mark.usefixtures("signer")
def test_a_failure_says_whether_to_try_again(error: Exception, kind: str) -> None:
    assert connect().fault_of(error).kind == kind


@pytest.mark.usefixtures("signer")
def test_no_address_stands_in_a_fault() -> None:
    url = "http://x/b/k?X-Amz-Signature=s3cr3t"
    fault = connect().fault_of(botocore_exceptions.EndpointConnectionError(endpoint_url=url))
    assert "s3cr3t" not in fault.what
    assert isinstance(fault, RemoteError)


def test_our_own_bug_is_not_taken_for_the_stores_fault() -> None:
    with pytest.raises(ZeroDivisionError):
        connect().fault_of(ZeroDivisionError())


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "s3://me:secret@bucket/key"])
def test_a_url_without_a_plain_bucket_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RequestError, match="wanted s3://BUCKET/KEY") as caught:
        split_url(url)
    assert "secret" not in str(caught.value)


def test_a_key_is_taken_as_it_is() -> None:
    assert split_url("s3://bucket/a b/c%20?d#.tar") == ("bucket", "a b/c%20?d#.tar")
    assert split_url("s3://bucket") == ("bucket", "")


def test_pauses_grow_to_a_bound_and_a_servers_wish_is_heard_up_to_it() -> None:
    patience = Patience(max_wait_seconds=4.0)
    for failures, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (50, 4.0), (5000, 4.0)):
        assert longest / 2 <= patience.wait_after(failures) <= longest
    assert patience.wait_after(1, wanted=3.0) == 3.0
    assert patience.wait_after(1, wanted=900.0) == 4.0
