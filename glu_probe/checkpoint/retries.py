"""Trying again what a network failed at: which failures pass, how long to wait between tries, and when to give up."""

from __future__ import annotations

import datetime
import email.utils
import random
import re
from collections.abc import Callable, Mapping
from time import sleep
from typing import TypeVar

TRIES = 6  # of one errand, the first included
AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))  # statuses that may be others a moment later
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 16.0  # seconds
_PATIENCE = 300.0  # seconds that a server may ask to be left alone; the hub counts requests in windows of this length
_Result = TypeVar("_Result")


class Broken(Exception):
    """An attempt failed in a way that may pass.

    Attributes:
        reason: in words, without anything that the request or the answer said.
        arrived: bytes that were received all the same.
        wait: seconds that the server asked to wait; 0 to try again at once, None if it did not say.
    """

    def __init__(self, reason: str, arrived: int = 0, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.arrived, self.wait = reason, arrived, wait


class Retries:
    """Counts the failures of one errand and waits between them: twice as long each time, with jitter."""

    def __init__(self, tries: int = TRIES) -> None:
        self.tries, self.failures = tries, 0

    def again(self, broken: Broken) -> bool:
        """Wait before the next attempt; False if there should be none."""
        self.failures += 1
        if self.failures >= self.tries or (broken.wait or 0) > _PATIENCE:
            return False
        if broken.wait is None:
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self.failures - 1)) * random.uniform(0.5, 1)
        else:  # never earlier than asked; some later, so that many readers do not come back at once
            wait = broken.wait * random.uniform(1, 1.1)
        sleep(wait)
        return True


def patiently(errand: Callable[[], _Result], tries: int = 3) -> _Result:
    """What the errand gives; it is run again when huggingface_hub or its client raise something that may pass."""
    retries = Retries(tries)
    while True:
        try:
            return errand()
        except Exception as error:
            response = getattr(error, "response", None)
            passing = getattr(response, "status_code", None) in AGAIN or may_pass(error)
            if not passing or not retries.again(Broken("", wait=asked_to_wait(getattr(response, "headers", {})))):
                raise


def may_pass(error: Exception) -> bool:
    """Whether an error is the network's and not the request's."""
    # The client is httpx's in some versions of huggingface_hub and httpx2's in others: told by the names they share.
    names = {kind.__name__ for kind in type(error).__mro__}
    return "TransportError" in names and not names & {"LocalProtocolError", "UnsupportedProtocol"}


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `Retry-After` (a number or a date) or by the hub's `RateLimit`; None if neither says."""
    said = headers.get("Retry-After", "").strip()
    if said.isdigit():
        return float(said)
    try:
        when = email.utils.parsedate_to_datetime(said)
        return max(0.0, (when - datetime.datetime.now(datetime.timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        left = re.search(r"\br=0\s*;\s*t=(\d+)", headers.get("RateLimit", ""))
        return float(left[1]) if left else None
