"""What an error keeps alive: the functions that it came through, with all that they had in hand."""

from __future__ import annotations

import traceback


def empty_frames(error: BaseException) -> None:
    """Whoever keeps the error keeps no chunk and no tensor with it, only the lines that it came through.

    Likewise for what it was raised from. Functions that are still running keep what they have.
    """
    emptied: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in emptied:
        traceback.clear_frames(one.__traceback__)
        emptied.add(id(one))
        one = one.__cause__
