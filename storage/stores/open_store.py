"""The store that a StoreRef names: s3, local or fsspec, by scheme."""

from __future__ import annotations

from storage.errors import UnsupportedStore
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ObjectStore


def open_store(
    ref: StoreRef,
    credentials: Credentials | None = None,
    *,
    read_timeout_s: float = 20.0,
    connect_timeout_s: float = 5.0,
) -> ObjectStore:
    """The store at `ref`. Nothing is asked of it yet, so a wrong bucket shows at the first call.

    A read that gets no byte for `read_timeout_s` fails. Raises UnsupportedStore for a scheme nobody serves.
    """
    # Imported here so that a local load needs no boto3, and an S3 load no fsspec: every worker pays for imports.
    if ref.scheme == "file":
        from storage.stores.local import LocalStore

        return LocalStore(ref.prefix)
    if ref.scheme == "s3":
        from storage.stores.s3.store import S3Store

        return S3Store(ref, credentials, read_timeout_s=read_timeout_s, connect_timeout_s=connect_timeout_s)
    if ref.scheme == "twin":
        raise UnsupportedStore("the in-memory twin is opened by its class, not by a URI")
    from storage.stores.fsspec_store import FsspecStore

    return FsspecStore(ref, credentials, read_timeout_s=read_timeout_s, connect_timeout_s=connect_timeout_s)
