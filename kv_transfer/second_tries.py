"""Repeated tries, now and then, to release what NIXL has failed to release."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

logger = logging.getLogger(__name__)

TRY_AGAIN_S = 1.0
"""Seconds between two tries; a transfer thread's passes are much shorter."""

SubjectT = TypeVar("SubjectT", bound=Hashable)


class SecondTries:
    """The pace of tries that may fail, for each of their subjects. Used on one thread."""

    def __init__(self) -> None:
        self._failed_at: dict[Hashable, float] = {}

    def run(self, subject: SubjectT, complaint: str, action: Callable[[SubjectT], bool]) -> bool:
        """Call `action` with `subject`, unless it has failed within the last `TRY_AGAIN_S`.

        Args:
            subject: the object of the action.
            complaint: logged when the action fails for the first time.
            action: has failed if it returns `False` or raises.

        Returns:
            Whether it was called and has not failed.
        """
        failed_at = self._failed_at.get(subject)
        if failed_at is not None and time.monotonic() - failed_at < TRY_AGAIN_S:
            return False
        level = logging.ERROR if failed_at is None else logging.DEBUG
        try:
            if action(subject):
                self._failed_at.pop(subject, None)
                return True
            logger.log(level, "%s; it is tried again", complaint)
        except Exception:  # NIXL's exceptions have no common base
            logger.log(level, "%s; it is tried again", complaint, exc_info=True)
        self._failed_at[subject] = time.monotonic()
        return False
