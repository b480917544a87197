"""A family whose rules do something to who asks for them: what runs in a worker can so be made to die, to raise or to wait.

Rules are asked for when a checkpoint is opened and when an MLP is read; only the second counts here.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import glu_probe as gp
from glu_probe.checkpoint import known_families
from glu_probe.errors import UnknownActivation
from glu_probe.jobs import _held

LAYER = 3


def in_a_job() -> bool:
    """Whether this is a worker that has opened its checkpoint."""
    return getattr(_held, "ticket", None) is not None


def die(part, layer, group):
    """Be killed, each time."""
    if layer == LAYER and in_a_job():
        os.kill(os.getpid(), signal.SIGKILL)


def dying_once_at(marker: Path):
    """Something that is killed the first time, and leaves that file."""

    def die_once(part, layer, group):
        if layer == LAYER and in_a_job() and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return die_once


def raise_own(part, layer, group):
    """An error of the package, with all its fields."""
    if layer == LAYER and in_a_job():
        raise UnknownActivation("the activation is strange", where="config.json", hint="Look at it")


def raise_other(part, layer, group):
    """An error that nobody expects."""
    if layer == LAYER and in_a_job():
        raise ZeroDivisionError("one over nothing")


def register(does) -> None:
    """Make `mischief` a family whose rules do that."""
    gp.register_family(
        "mischief", projections=("gate_proj", "up_proj", "down_proj"), act="silu", norm="post_attention_layernorm",
        missing=does,
    )  # fmt: skip


def forget() -> None:
    """The family is not known any more."""
    for names in (known_families._REGISTERED, known_families._BY_NAME):
        names.pop("mischief", None)
