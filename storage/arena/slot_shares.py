"""Who may take how many slots: a guaranteed minimum for each owner, the rest shared, the oldest owner first.

An owner is whatever the caller gives slots to (a load). It *uses* a slot while it has a claim on it: a lease,
a pin, a reader. A slot that two owners use counts for both. The one law everything rests on:

    sum over owners of max(minimum, used) <= slot_count

so an owner below its minimum always finds a slot that nobody uses, whatever the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from storage.errors import ArenaTooSmall


@dataclass(slots=True)
class _Share:
    age: int  # order of arrival: smaller is older
    minimum: int = 0  # slots it can always have
    claims: Counter[int] = field(default_factory=Counter)  # slot -> claims on it

    @property
    def used(self) -> int:
        return len(self.claims)

    @property
    def demand(self) -> int:
        return max(self.minimum, len(self.claims))


class SlotShares:
    """The books over `slot_count` slots. Operations are O(1), or O(owners) where one asks for more."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self._shares: dict[Hashable, _Share] = {}
        self._queue: dict[Hashable, int] = {}  # owners that wait for their minimum, in order of arrival
        self._hungry: set[Hashable] = set()  # owners that were refused a shared slot and have not had one since
        self._demand = 0  # sum of all demands
        self._minima = 0  # sum of all minima
        self._arrivals = 0

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Owners whose `reserve` was not granted yet, first come first."""
        return tuple(self._queue)

    def used(self, owner: Hashable) -> int:
        """Slots the owner uses now."""
        share = self._shares.get(owner)
        return 0 if share is None else share.used

    def minimum(self, owner: Hashable) -> int:
        """Slots the owner was granted."""
        share = self._shares.get(owner)
        return 0 if share is None else share.minimum

    def demand(self, owner: Hashable) -> int:
        """Slots that nobody else can have: those the owner uses, its minimum at least."""
        share = self._shares.get(owner)
        return 0 if share is None else share.demand

    def reserve(self, owner: Hashable, minimum: int) -> bool:
        """Guarantee the owner `minimum` slots. False: ask again later; those who asked before come first.

        Raises ArenaTooSmall when all slots together are fewer.
        """
        if minimum > self.slot_count:
            raise ArenaTooSmall(
                "the arena has fewer slots than the load needs at least",
                hint="set LONGSHORE_ARENA_BYTES to more, or let fewer ranks share the node",
                slots=self.slot_count,
                needed_slots=minimum,
            )
        if self.minimum(owner) >= minimum:
            return True
        self._queue[owner] = minimum
        if next(iter(self._queue)) != owner:
            return False
        share = self._share(owner)
        demand = self._demand - share.demand + max(minimum, share.used)
        if demand > self.slot_count:
            return False
        del self._queue[owner]
        self._minima += minimum - share.minimum
        self._demand = demand
        share.minimum = minimum
        return True

    def end(self, owner: Hashable) -> None:
        """The owner wants nothing more. What it still uses counts until its last claim is dropped."""
        self._queue.pop(owner, None)
        self._hungry.discard(owner)
        share = self._shares.get(owner)
        if share is None:
            return
        self._demand -= share.demand - share.used
        self._minima -= share.minimum
        share.minimum = 0
        self._forget(owner, share)

    def may_claim(self, owner: Hashable, slot: int | None = None) -> bool:
        """Whether the owner may use one slot more (`slot`, if it is known; one it uses already is free)."""
        share = self._shares.get(owner)
        if share is not None and (share.used < share.minimum or (slot is not None and slot in share.claims)):
            return True
        if self._demand + 1 > self.slot_count or self._somebody_shrinks_us():
            return False
        age = self._arrivals if share is None else share.age
        return all(self._shares[other].age >= age for other in self._hungry)

    def may_use(self, owner: Hashable, slot: int) -> bool:
        """`may_claim` for that slot, and the owner's wish is remembered when it may not."""
        if self.may_claim(owner, slot):
            self.satisfied(owner)
            return True
        self.refused(owner)
        return False

    def refused(self, owner: Hashable) -> None:
        """The owner wanted a slot and got none: younger owners get no shared slot before it does.

        Only for owners with a minimum: of the others nobody says when they have ended.
        """
        if self.minimum(owner):
            self._hungry.add(owner)

    def satisfied(self, owner: Hashable) -> None:
        """The owner wants no slot now, or has got one."""
        self._hungry.discard(owner)

    def claim(self, owner: Hashable, slot: int) -> None:
        """Count one claim of the owner on the slot. Ask `may_claim` first; here nothing is refused."""
        share = self._share(owner)
        before = share.demand
        share.claims[slot] += 1
        self._demand += share.demand - before

    def drop(self, owner: Hashable, slot: int) -> None:
        """Take one claim back. Raises KeyError when there is none."""
        share = self._shares[owner]
        if not share.claims[slot]:
            raise KeyError(slot)
        before = share.demand
        share.claims[slot] -= 1
        if not share.claims[slot]:
            del share.claims[slot]
        self._demand += share.demand - before
        self._forget(owner, share)

    def _somebody_shrinks_us(self) -> bool:
        """Whether the first in the queue could have its minimum if the others used no more than theirs."""
        for owner, minimum in self._queue.items():
            return self._minima - self.minimum(owner) + minimum <= self.slot_count
        return False

    def _share(self, owner: Hashable) -> _Share:
        if owner not in self._shares:
            self._shares[owner] = _Share(self._arrivals)
            self._arrivals += 1
        return self._shares[owner]

    def _forget(self, owner: Hashable, share: _Share) -> None:
        if not share.minimum and not share.claims and owner not in self._queue and owner not in self._hungry:
            del self._shares[owner]
