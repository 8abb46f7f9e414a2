"""The choice of a store for a StoreRef: S3, local or fsspec, by scheme."""

from __future__ import annotations

from storage.errors import UnsupportedStore
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ObjectStore

UNSAVABLE = {"http", "https", "hf"}  # read only; the Hub would make a commit of each file, the journal's versions too


def open_store(
    ref: StoreRef,
    credentials: Credentials | None = None,
    *,
    read_timeout_s: float = 20.0,
    connect_timeout_s: float = 5.0,
) -> ObjectStore:
    """Return the store at `ref`. It sends no request yet, so a wrong bucket shows at the first call.

    A read that receives no byte for `read_timeout_s` fails. Raises UnsupportedStore for a scheme that no store serves.
    """
    # Imported here, because every worker pays for imports: a local load needs no botocore, and an S3 load no fsspec.
    if ref.scheme == "file":
        from storage.stores.local import LocalStore

        return LocalStore(ref.prefix)
    if ref.scheme == "s3":
        from storage.stores.s3.store import S3Store

        return S3Store(ref, credentials, read_timeout_s=read_timeout_s, connect_timeout_s=connect_timeout_s)
    if ref.scheme == "twin":
        raise UnsupportedStore("a twin:// URI cannot be opened", hint="create a MemoryStore and use it directly")
    from storage.stores.fsspec_store import FsspecStore, StreamedStore

    kind = FsspecStore if ref.scheme in UNSAVABLE else StreamedStore
    return kind(ref, credentials, read_timeout_s=read_timeout_s, connect_timeout_s=connect_timeout_s)
