"""Who wants a model to stay: clients that renew their hold, and the keep flag. Pure; the clock is passed in.

How a model's store is read, and for which clients that has worked. Pure; the clock is passed in.

A load is read with the access that its client passed (store, profile, credentials). Every later client is checked with
its own access before it is given the model. Only an access that worked is kept, one per client, so that wrong or
expired credentials of one client change nothing for the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.request import StoreAccess


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
        """Add a client's access that the store accepted at `now_s`; an earlier one of the same client is replaced."""
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
        """Return every access that may be used to read, each once: those of holders first, the newest proof first."""
        newest_first = sorted(reversed(self.proofs), key=lambda proof: proof.client_id not in holder_ids)
        found: list[StoreAccess] = []
        for proof in newest_first:
            if proof.access not in found:
                found.append(proof.access)
        return found

    def without_gone(self, holder_ids: Collection[str], since_s: float) -> ProvenAccess:
        """Forget clients that hold the model no more, once their proof is older than `since_s`.

        The newest proof of all stays: a kept model without holders must still be readable.
        """
        kept = (proof for proof in self.proofs if proof.client_id in holder_ids or proof.proven_s >= since_s)
        return ProvenAccess(tuple(kept) or self.proofs[-1:])
