"""Clients that hold a model, and the store access of each client that has worked. Pure; the clock is passed in.

A model stays in memory while a client renews its hold, or while its keep flag is set.

A load is read with the access that its client passed (store, profile, credentials). The store checks every later client
with its own access before that client receives the model. Only an access that worked is kept, one per client. So wrong
or expired credentials of one client change nothing for the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.request import StoreAccess


@dataclass(frozen=True, slots=True)
class Holders:
    """The clients that hold a model, and its keep flag. The model stays while there is either."""

    keep: bool = False
    heard_s: tuple[tuple[str, float], ...] = ()  # (client id, time of its last request)

    def __len__(self) -> int:
        return len(self.heard_s)

    @property
    def ids(self) -> frozenset[str]:
        """Return the ids of the clients that hold the model."""
        return frozenset(client_id for client_id, _ in self.heard_s)

    @property
    def wanted(self) -> bool:
        """Return whether the model must stay in memory."""
        return self.keep or bool(self.heard_s)

    def hold(self, client_id: str, now_s: float, *, keep: bool = False) -> Holders:
        """Return the holders after `client_id` took or renewed its hold. A keep flag stays set."""
        others = tuple(entry for entry in self.heard_s if entry[0] != client_id)
        return Holders(self.keep or keep, (*others, (client_id, now_s)))

    def drop(self, client_id: str) -> Holders:
        """Return the holders without this client."""
        return replace(self, heard_s=tuple(entry for entry in self.heard_s if entry[0] != client_id))

    def without_lapsed(self, now_s: float, ttl_s: float) -> Holders:
        """Return the holders without the clients that sent no request for longer than `ttl_s`."""
        return replace(self, heard_s=tuple(entry for entry in self.heard_s if now_s - entry[1] <= ttl_s))


@dataclass(frozen=True, slots=True)
class Proof:
    """One client's access, and when the store last accepted it."""

    client_id: str
    access: StoreAccess
    proven_s: float


@dataclass(frozen=True, slots=True)
class ProvenAccess:
    """The access of each client of one model, oldest proof first."""

    proofs: tuple[Proof, ...] = ()

    def proven(self, client_id: str, access: StoreAccess, now_s: float) -> ProvenAccess:
        """Record an access that the store accepted at `now_s`. It replaces an earlier one of the same client."""
        others = (proof for proof in self.proofs if proof.client_id != client_id)
        return ProvenAccess(tuple(sorted((*others, Proof(client_id, access, now_s)), key=lambda proof: proof.proven_s)))

    def has(self, client_id: str) -> bool:
        """Return True when an access of this client has worked."""
        return any(proof.client_id == client_id for proof in self.proofs)

    def worked_at_s(self, access: StoreAccess, since_s: float) -> float | None:
        """Return when the store last accepted exactly this access, for any client; None if not after `since_s`."""
        times_s = [proof.proven_s for proof in self.proofs if proof.access == access and proof.proven_s >= since_s]
        return max(times_s, default=None)

    def candidates(self, holder_ids: Collection[str]) -> list[StoreAccess]:
        """Return each access that may be used to read, once. Holders come first, then the newest proof."""
        newest_first = sorted(reversed(self.proofs), key=lambda proof: proof.client_id not in holder_ids)
        found: list[StoreAccess] = []
        for proof in newest_first:
            if proof.access not in found:
                found.append(proof.access)
        return found

    def without_gone(self, holder_ids: Collection[str], since_s: float) -> ProvenAccess:
        """Remove clients that no longer hold the model, once their proof is older than `since_s`.

        The newest proof of all stays: a kept model without holders must still be readable.
        """
        older, newest = self.proofs[:-1], self.proofs[-1:]
        kept = (proof for proof in older if proof.client_id in holder_ids or proof.proven_s >= since_s)
        return ProvenAccess((*kept, *newest))
