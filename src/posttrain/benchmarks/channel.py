"""A peer's side: one JSON object a line, a request in, an answer out.

Standard library only: peers run in environments of their own, with other packages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any


class Channel:
    """Standard output belongs to the answers; what libraries print there goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def request(self) -> dict[str, Any] | None:
        """Waits for the next one; None when there will be no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def requests(self) -> Iterator[dict[str, Any]]:
        """All of them, in order."""
        while (request := self.request()) is not None:
            yield request

    def answer(self, answer: Mapping[str, Any]) -> None:
        """To the last request; the first one of all says that the peer is ready."""
        self._answers.write(json.dumps(dict(answer)) + "\n")
