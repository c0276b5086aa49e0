"""The S3 client that reading and writing share: who we are, where the store is, how long to wait.

Everything comes from where boto3 looks for it: AWS_ACCESS_KEY_ID and its kin, AWS_PROFILE, roles
of the machine; AWS_ENDPOINT_URL (or _S3) and AWS_REGION. At an endpoint of one's own, buckets
stand in the path unless the profile says otherwise. Without any credentials requests go unsigned,
as public buckets want it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from pipeline.errors import RequestError
from pipeline.remote.faults import RemoteError, fault_of_status
from pipeline.remote.patience import Patience

MAX_CONNECTIONS = 64
_TRANSIENT_CODES = frozenset(
    [
        *("InternalError", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException"),
        *("RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted"),
        *("RequestTimeout", "RequestTimeTooSkewed"),
        "ConditionalRequestConflict",  # another write of the key is under way
    ]
)
_DENIED_CODES = frozenset(
    [
        *("AccessDenied", "AllAccessDisabled", "AccountProblem"),
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
    ]
)
_READS = frozenset(["GetObject", "HeadObject"])

_clients: dict[tuple[object, ...], S3] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class S3:
    """A boto3 client, safe on any thread, and whether it signs what it asks."""

    client: Any
    is_signed: bool

    def fault_of(self, error: Exception) -> RemoteError:
        """Return what a request's failure means; an error that is not S3's is raised as it is."""
        fault = _fault_of(error)
        if fault.kind == "denied" and not self.is_signed:
            return RemoteError(
                "denied", f"{fault.what} (no credentials were found, so none were sent)"
            )
        return fault


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket and the key that an `s3://` url names; RequestError for no bucket."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or "@" in bucket or ":" in bucket:
        raise RequestError(
            "an s3:// url with no plain bucket name; wanted s3://BUCKET/KEY, "
            "with the credentials in the environment or a profile"
        )
    return bucket, key


def connect(*, attempts: int = 1) -> S3:
    """Return the process's client whose requests are made up to `attempts` times by boto3 itself.

    Who resumes where a transfer broke off wants 1, and counts for itself. Raises RequestError
    where boto3 is not installed, or its configuration makes no sense.
    """
    patience = Patience.from_environment()
    aws = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (attempts, patience, aws, os.environ.get("HOME"), os.getpid())  # none goes over a fork
    with _lock:
        if key not in _clients:
            _clients[key] = _connect(attempts, patience)
        return _clients[key]


def _connect(attempts: int, patience: Patience) -> S3:
    try:
        import boto3
        import botocore.exceptions
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        raise RequestError("s3:// needs boto3; pip install 'captionjob[s3]'") from None
    try:
        session = boto3.Session()
        scoped = session._session.get_scoped_config()
        is_signed = session.get_credentials() is not None
        has_endpoint = bool(_endpoint(scoped))
        is_style_open = "addressing_style" not in (scoped.get("s3") or {})
        config = Config(
            signature_version="s3v4" if is_signed else UNSIGNED,
            connect_timeout=patience.connect_seconds,
            read_timeout=patience.stall_seconds,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=MAX_CONNECTIONS,
            s3={"addressing_style": "path"} if has_endpoint and is_style_open else None,
            user_agent_extra="captionjob",
        )
        region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        return S3(session.client("s3", region_name=region, config=config), is_signed)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise RequestError(f"s3://: {_one_line(error)}") from None


def _endpoint(scoped: dict[str, Any]) -> str:
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return str(found or scoped.get("endpoint_url") or scoped.get("services") or "")


def _fault_of(error: Exception) -> RemoteError:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    # boto3 takes `Content-Length: ` for a header when the connection ends just there.
    if isinstance(error, (ResponseParserError, ValueError)):
        return RemoteError("transient", "the answer broke off")
    if isinstance(error, exceptions.ClientError):
        return _fault_of_answer(error)
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return RemoteError("denied", "no complete credentials were found")
    if isinstance(error, exceptions.CredentialRetrievalError):
        return RemoteError("denied", f"the credentials could not be fetched: {_one_line(error)}")
    if isinstance(error, (exceptions.UnauthorizedSSOTokenError, exceptions.TokenRetrievalError)):
        return RemoteError("denied", f"the login is over: {_one_line(error)}")
    if isinstance(error, (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError)):
        is_read = isinstance(error, exceptions.ReadTimeoutError)
        return RemoteError("transient", "the store stalled" if is_read else "connecting timed out")
    if isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return RemoteError("refused", "the store's certificate is not trusted")
    if isinstance(error, exceptions.EndpointConnectionError):
        return RemoteError("transient", "the store cannot be reached")
    if isinstance(
        error,
        (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError),
    ):
        return RemoteError("transient", _one_line(error))
    if isinstance(error, exceptions.FlexibleChecksumError):
        return RemoteError("transient", "what came does not match the store's checksum")
    if isinstance(error, exceptions.BotoCoreError):
        return RemoteError("refused", _one_line(error))
    if isinstance(error, OSError):
        return RemoteError(
            "transient", f"the connection broke: {error.strerror or type(error).__name__}"
        )
    raise error


def _fault_of_answer(error: Any) -> RemoteError:
    """Return the fault in an answer of the store: its code, or where there is none the status."""
    told = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(told.get("Code", ""))
    what = f"{status} {code}" if code and code != str(status) else f"{status}"
    if status == 412 or code == "PreconditionFailed":
        return RemoteError("changed" if error.operation_name in _READS else "exists", what)
    if code in _DENIED_CODES:
        return RemoteError("denied", what)
    if code in _TRANSIENT_CODES:
        return RemoteError("transient", what)
    if not status:
        return RemoteError("refused", what or "an answer without a status")
    return fault_of_status(status, what)


def _one_line(error: Exception) -> str:
    """Return an error's words without addresses, where a signature might stand in the query."""
    words = str(error).split()
    return " ".join("(an address)" if "://" in word else word for word in words)[:200]
