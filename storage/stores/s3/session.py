"""boto3 follows one kind of redirect, to another region; here that is kept within bounds.

It asks HeadBucket for the region, and follows redirects of that request in the same way: a server that redirects
everything would send it round until Python's stack ends. And where an endpoint was given, no region changes the place.

A boto3 client with its credentials, made again when the store says that they are not good any more.

    403 ExpiredToken, ...      the credential chain is asked anew: a file that was rewritten, a role, an instance
    403 RequestTimeTooSkewed   requests are signed by the store's clock, which its answer tells

Only refused requests lead here. Credentials that tell when they end botocore renews before that.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from storage.errors import CredentialsExpired
from storage.store_ref import Credentials, StoreRef
from storage.stores.retrying import RetryPolicy, passing_refusal
from storage.stores.s3.answers import code_of, from_botocore_error
from storage.stores.s3.botocore_private import follow_no_redirects, on_refused, share_service_models
from storage.stores.s3.bounds import bound_answers
from storage.stores.s3.signing import sign_by_clock

if TYPE_CHECKING:
    from botocore.credentials import Credentials as BotoCredentials
    from mypy_boto3_s3.client import S3Client


def bound_redirects(client: S3Client, *, own_endpoint: bool) -> None:
    """No redirect of HeadBucket is followed, and with an endpoint of its own none at all."""
    follow_no_redirects(client, lambda operation: own_endpoint or operation == "HeadBucket")


_ATTEMPTS = 3  # tries of one request that is no read; whole operations are tried again above
CLOCK_SLACK_S = 60.0  # a clock that is off by less is not why a request was refused: stores allow 15 minutes


@dataclass(frozen=True, slots=True, eq=False)
class S3Session:
    """What requests are made and signed with."""

    client: S3Client
    credentials: BotoCredentials | None  # None: requests are not signed
    ca_bundle: str | None
    clock_offset_s: float = 0.0  # the store's clock is so far ahead of ours


class S3Sessions:
    """The session of one store, `now`. Thread-safe."""

    def __init__(
        self, ref: StoreRef, credentials: Credentials | None, read_timeout_s: float, connect_timeout_s: float
    ) -> None:
        """Without `credentials` the AWS credential chain of this process is used.

        Raises AccessDenied for a profile that is not configured here.
        """
        self._ref = ref
        self._passed = credentials if credentials is not None and credentials.access_key_id else None
        self._answer_s = 2 * read_timeout_s
        self._config = _client_config(ref, read_timeout_s, connect_timeout_s)
        self._lock = threading.Lock()
        self._clock_offset_s = 0.0
        self.now = self._open()

    def renew(self, used: S3Session, error: CredentialsExpired) -> bool:
        """A request made with `used` was refused. True: another try is made with something else.

        Many threads may say so at once: one renews for all. Raises AccessDenied when the chain finds nothing.
        """
        with self._lock:
            if self.now is not used:
                return True
            if error.details.get("code") == "RequestTimeTooSkewed":
                offset_s = clock_offset_s(error.details.get("server_time"), time.time())
                if offset_s is None or abs(offset_s - used.clock_offset_s) < CLOCK_SLACK_S:
                    return False
                self._clock_offset_s = offset_s
                self.now = replace(used, clock_offset_s=offset_s)
                return True
            if self._passed is not None or used.credentials is None:
                return False  # whoever passed them has to pass others
            self.now = replace(self._open(), clock_offset_s=used.clock_offset_s)
            return True

    def _open(self) -> S3Session:
        ref = self._ref
        try:
            core = botocore.session.Session(profile=ref.profile)
            share_service_models(core)
            if self._passed is not None:
                key_id, secret = self._passed.access_key_id or "", self._passed.secret_access_key or ""
                core.set_credentials(key_id, secret, self._passed.session_token)
            ca_bundle = ref.ca_bundle or core.get_config_variable("ca_bundle")
            client: S3Client = boto3.Session(botocore_session=core).client(
                "s3",
                endpoint_url=ref.endpoint_url,
                # A server with an endpoint of its own rarely cares for the region, but the signature has one.
                region_name=ref.region
                or core.get_config_variable("region")
                or ("us-east-1" if ref.endpoint_url else None),
                verify=ca_bundle,
                config=self._config,
            )
            credentials = None if ref.anonymous else core.get_credentials()
            _retry_by_our_table(client)
            bound_redirects(client, own_endpoint=ref.endpoint_url is not None)
            sign_by_clock(client, credentials, lambda: self._clock_offset_s)
            bound_answers(client, uri=ref.uri, answer_s=self._answer_s)
            return S3Session(client, credentials, ca_bundle)
        except (BotoCoreError, ValueError) as error:
            raise from_botocore_error(error, uri=ref.uri) from error


def clock_offset_s(server_time: object, now_s: float) -> float | None:
    """How far the clock of an HTTP date is ahead of `now_s` (seconds since 1970); None when it is no date."""
    try:
        return parsedate_to_datetime(str(server_time)).timestamp() - now_s
    except (ValueError, OverflowError, OSError):
        return None


def _retry_by_our_table(client: S3Client) -> None:
    """Have the client retry what `passing_refusal` lists, besides what botocore itself retries."""
    policy = RetryPolicy(attempts=_ATTEMPTS)

    def pause_s(status: int, parsed: Mapping[str, Any], attempts: int) -> float | None:
        if attempts >= _ATTEMPTS or passing_refusal(status, code_of(parsed)) is None:
            return None
        return policy.pause_s(attempts, random.random())

    on_refused(client, pause_s)


def _client_config(ref: StoreRef, read_timeout_s: float, connect_timeout_s: float) -> Config:
    options: dict[str, Any] = {"signature_version": UNSIGNED} if ref.anonymous else {}
    return Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=32,
        s3={"addressing_style": ref.addressing_style},
        # Servers that send whole-object checksums with ranges, or refuse trailing ones, exist.
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
        **options,
    )
