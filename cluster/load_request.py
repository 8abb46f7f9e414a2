"""What a client asks for, and where the model is. It travels to the coordinator and to its planning process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.device_map.deciding import DeviceKey
from cluster.device_map.options import DeviceMapOptions
from cluster.fit.options import FitOptions, FitTry
from cluster.layouts.mesh import Layout
from cluster.precision.recipes import Precision
from storage.store_ref import Credentials, StoreRef


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Where a model is and how to read it. The repr of credentials is redacted by their own class."""

    ref: StoreRef
    credentials: Credentials | None = None  # None: the node's own (environment, profile, instance role)

    def without_credentials(self) -> StoreAccess:
        """For whatever is kept: credentials that a client passed live in messages only."""
        return StoreAccess(self.ref)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a client asks for."""

    uri: str  # as given, without secrets
    store: StoreAccess
    only_key: str | None  # the URI named one file under the root
    layout: Layout
    device: str  # "cpu" or "cuda"
    layout_rules: dict[str, str] | None
    keep: bool
    client_id: str
    wait_for_resources_s: float
    placement: str = "auto"  # "via_arena", "direct", or "auto": direct when the arena is smaller than the node's share
    placement_group: Any = None  # ray PlacementGroup of the caller's; rank i takes bundle i
    trusted_keys: tuple[str, ...] = ()  # public keys, base64; empty: as the cluster's settings say
    fit: FitOptions = field(default_factory=FitOptions)
    precision: Precision = field(default_factory=Precision)
    device_map: DeviceMapOptions | None = None  # one rank with several devices
    node_memory: tuple[tuple[DeviceKey, int], ...] = ()  # limits of that map where none were given, once they are known
    tried: tuple[FitTry, ...] = ()  # of fit="auto", once decided: its steps, the last of them taken
    signed_name: str = ""  # under which the manifest must be signed, if it must be; "": the path of the URI
    revision: str = ""  # the only one that will do; "": what is stored
    auto_identity: str = ""  # of fit="auto", once decided: that of the request as it was asked

    @property
    def world_size(self) -> int:
        return self.layout.ranks

    @property
    def mapping(self) -> DeviceMapOptions | None:
        """The device map with the limits that are known by now."""
        if self.device_map is None or not self.node_memory:
            return self.device_map
        return replace(self.device_map, max_memory=self.node_memory, is_all=self.device_map.max_memory is None)

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that a rank's worker has when its device is "cuda"."""
        return max(1, (self.mapping.gpus or 0) if self.mapping else 0)

    def identity(self) -> str:
        """Equal for requests that can share one resident model, whatever its revision."""
        if self.auto_identity:
            return self.auto_identity
        rules = list((self.layout_rules or {}).items())  # in their order: the first match wins
        group = getattr(self.placement_group, "id", None)
        return repr(
            (
                self.store.ref.identity(),
                self.only_key,
                self.layout,
                self.device,
                rules,
                None if group is None else group.hex(),
                sorted(self.trusted_keys),  # who checks signatures never shares with who did not
                self.signed_name,
                self.precision,
                self.device_map,
                self.fit.identity(),  # nor who takes what fits with who takes nothing else
            )
        )
