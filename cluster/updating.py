"""The client's side of what changes a resident model: an update in place, another number of replicas.

The client chooses the change's id, so asking again, of a restarted coordinator too, begins nothing twice.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import LoadCancelled, LoadTimeout
from cluster.joining.connection import Connection
from cluster.joining.patience import Patience
from cluster.options import check_revision, check_signed_name
from cluster.request import LoadRequest, StoreAccess, StoreOptions, UpdateRequest
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from storage.store_ref import Credentials, StoreRef

WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """The options of an update; see `cluster.update`."""

    uri: str | os.PathLike[str] | None = None
    revision: str | None = None
    streaming: bool = False
    signed_name: str | None = None
    store: StoreOptions = field(default_factory=StoreOptions)
    credentials: Credentials | None = None

    @property
    def names_place(self) -> bool:
        """True where the new revision is read at another place than the model, or with other options of the store."""
        return self.uri is not None or self.credentials is not None or self.store != StoreOptions()

    def at(self, now: LoadRequest) -> UpdateOptions:
        """Return the options with the model's own place and signed name where they have no URI."""
        if self.uri is not None:
            return self
        return replace(self, uri=now.uri, signed_name=self.signed_name or now.signed_name or None)

    def request(self, client_id: str, known: StoreAccess | None) -> UpdateRequest:
        """Return the request. `known`: this client's access to the model, or the place that the cluster knows.

        Raises InvalidUri, UnsupportedStore, ConfigError.
        """
        asked = UpdateRequest(
            uuid.uuid4().hex[:16],
            client_id,
            revision=check_revision(self.revision) or "",
            signed_name=check_signed_name(self.signed_name) or "",
            streaming=self.streaming,
        )
        if self.uri is None:
            return asked
        options = self.store if known is None else self._beside(known.ref)
        ref, only_key = options.resolve(self.uri)
        credentials = self.credentials
        if credentials is None and known is not None and replace(ref, prefix="") == replace(known.ref, prefix=""):
            credentials = known.credentials
        if credentials is not None:
            ref = replace(ref, options=credentials.place())
        uri = f"{ref.uri}/{only_key}" if only_key else ref.uri
        return replace(asked, uri=uri, store=StoreAccess(ref, credentials), only_key=only_key)

    def _beside(self, ref: StoreRef) -> StoreOptions:
        """Return the options of the store, with those of the model's own where none are given."""
        options, anonymous = self.store, self.store.anonymous
        if anonymous is None:  # whoever names credentials wants signed requests
            anonymous = ref.anonymous and self.credentials is None and options.profile is None
        return StoreOptions(
            options.endpoint_url or ref.endpoint_url,
            options.region or ref.region,
            options.profile or ref.profile,
            anonymous,
        )


def update_on(connection: Connection, model_id: str, options: UpdateOptions, patience: Patience) -> UpdateReport:
    """Update a model and wait for the end. Raises the update's error; LoadTimeout, LoadCancelled: it goes on then."""
    known = connection.access_of(model_id)
    if options.names_place and (known is None or options.uri is None):  # another client may have changed its own place
        now = connection.call("request_of", model_id, patience=patience)
        options, known = options.at(now), now.store
    asked = options.request(connection.client_id, known)
    done: UpdateReport = _changed(connection, model_id, "update", asked.update_id, (asked,), patience)
    if asked.store is not None:
        connection.read_with(model_id, asked.store)
    return done


def scale_on(connection: Connection, model_id: str, data_parallel_size: int, patience: Patience) -> ScaleReport:
    """Change the number of replicas, and wait for the end. Raises its error; LoadTimeout, LoadCancelled: it goes on."""
    scale_id = uuid.uuid4().hex[:16]
    arguments = scale_id, data_parallel_size
    done: ScaleReport = _changed(connection, model_id, "scale", scale_id, arguments, patience)
    return done


def _changed(
    connection: Connection, model_id: str, verb: str, change_id: str, arguments: tuple[Any, ...], patience: Patience
) -> Any:
    """Ask until the change is over. Return its report."""
    doing = ""
    while True:
        try:
            doing, report, error = connection.call(
                verb, model_id, *arguments, patience.left_s(WAIT_S), patience=patience
            )
        except (LoadTimeout, LoadCancelled) as late:
            raise late.with_details(model=model_id, **{verb: change_id}, doing=doing) from None
        if error is not None:
            raise error
        if report is not None:
            return report
