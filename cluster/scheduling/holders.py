"""Who wants a model to stay: clients that renew their hold, and the keep flag. Pure; the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Holders:
    """A model is wanted while it has a holder or is kept."""

    keep: bool = False
    heard_s: tuple[tuple[str, float], ...] = ()  # (client id, when it was last heard)

    def __len__(self) -> int:
        return len(self.heard_s)

    @property
    def ids(self) -> frozenset[str]:
        """Client ids."""
        return frozenset(client_id for client_id, _ in self.heard_s)

    @property
    def wanted(self) -> bool:
        return self.keep or bool(self.heard_s)

    def hold(self, client_id: str, now_s: float, *, keep: bool = False) -> Holders:
        """`client_id` holds the model, from now on or still. A keep once given stays."""
        others = tuple(entry for entry in self.heard_s if entry[0] != client_id)
        return Holders(self.keep or keep, (*others, (client_id, now_s)))

    def drop(self, client_id: str) -> Holders:
        return replace(self, heard_s=tuple(entry for entry in self.heard_s if entry[0] != client_id))

    def without_lapsed(self, now_s: float, ttl_s: float) -> Holders:
        """Without the clients that have not been heard for longer than `ttl_s`."""
        return replace(self, heard_s=tuple(entry for entry in self.heard_s if now_s - entry[1] <= ttl_s))
