"""Which layers a user means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .errors import BadOption

_PART = re.compile(r"^\s*(?:(?P<only>\d+)|(?P<start>\d*)\s*:\s*(?P<stop>\d*))\s*$")


def select_layers(layers: Iterable[int] | str | None, present: Sequence[int]) -> set[int]:
    """The layers of `present` that are meant.

    Args:
        layers: None for all, indices, or text: "0:8" for layers 0 to 7, "0,4,7" for single ones, or a mixture. "20:"
            is whatever there is from 20 on; a range with an end lies within the model.
        present: every layer there is.

    Raises:
        BadOption: the text is not understood, a single layer does not exist, or a range ends beyond the last layer or has
            none in it.

    >>> sorted(select_layers("0:2, 5", range(8)))
    [0, 1, 5]
    """
    if layers is None:
        return {*present}
    known = f"There are layers {min(present)} to {max(present)}" if present else "There are no layers"
    chosen, single = set(), []
    if isinstance(layers, str):
        for part in layers.split(","):
            match = _PART.match(part)
            if match is None:
                raise BadOption(
                    f"layers {layers!r} is not understood",
                    hint='Write "0:8" for layers 0 to 7, or "0,4,7" for single ones',
                )
            if match["only"]:
                single.append(int(match["only"]))
            else:
                chosen |= _range(part.strip(), int(match["start"] or 0), match["stop"], present, known)
    else:
        try:
            single = list(layers)
        except TypeError:
            raise BadOption(f"layers is {layers!r}", hint=f"Give a sequence, such as [{layers}], or text") from None
    for layer in single:
        if isinstance(layer, bool) or layer not in present:
            raise BadOption(f"there is no layer {layer!r}", hint=known)
    chosen |= {int(layer) for layer in single}
    if not chosen:
        raise BadOption(f"layers {layers!r} name no layer", hint=known)
    return chosen


def _range(words: str, start: int, stop: str, present: Sequence[int], known: str) -> set[int]:
    """The layers of one range, whose end must be one of a layer there is: cut short, it would be another choice."""
    end = max(present, default=-1) + 1 if stop == "" else int(stop)
    chosen = {layer for layer in present if start <= layer < end}
    if not chosen:
        raise BadOption(f"layers {words!r} name no layer", hint=known)
    if end > max(present) + 1:
        raise BadOption(
            f"layers {words!r} end beyond the last layer",
            hint=f'{known}; "{start}:" is all of them' + (f" from {start} on" if start else ""),
        )
    return chosen
