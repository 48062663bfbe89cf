"""The order in which entries of several owners make room, so that no owner displaces all others."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class FairShares(Generic[KeyT]):
    """Entries with an owner and a size, by age.

    First to go are the oldest of owners that have more than an equal share of all.
    """

    def __init__(self) -> None:
        self.total = 0
        """The size of all entries."""
        self._owners: dict[KeyT, str] = {}
        self._by_owner: defaultdict[str, OrderedDict[KeyT, tuple[int, int]]]
        self._by_owner = defaultdict(OrderedDict)  # the age and the size of each
        self._kept: Counter[str] = Counter()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, key: KeyT, owner: str, size: int) -> None:
        """Add an entry, which is the youngest. It must not be here."""
        assert key not in self._owners, f"{key} comes twice"
        self._owners[key] = owner
        self._by_owner[owner][key] = next(self._numbers), size
        self._kept[owner] += size
        self.total += size

    def remove(self, key: KeyT) -> None:
        """Remove an entry, if it is here."""
        owner = self._owners.pop(key, None)
        if owner is None:
            return
        _, size = self._by_owner[owner].pop(key)
        self._kept[owner] -= size
        self.total -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._kept[owner]

    def of(self, owner: str) -> Iterator[KeyT]:
        """Iterate over an owner's entries, the oldest first."""
        return iter(self._by_owner.get(owner, ()))

    def first_to_go(self, last: KeyT | None = None) -> KeyT | None:
        """Find the entry that makes room first; `last` comes after all others. None: all went."""
        if not self._owners:
            return None
        share = self.total / len(self._by_owner)

        def order(key: KeyT) -> tuple[bool, bool, int]:
            owner = self._owners[key]
            age, _ = self._by_owner[owner][key]
            return key == last, self._kept[owner] <= share, age

        oldest = [
            next((key for key in entries if key != last), next(iter(entries)))
            for entries in self._by_owner.values()
        ]
        return min(oldest, key=order)
