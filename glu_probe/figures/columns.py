"""What a frame must have to be drawn; each refusal says what to pass instead."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pandas as pd

from ..errors import BadOption

_PLACES = (
    "tower",
    "group",
    "activation",
    "model",
    "layers",
    "expert",
    "neurons",
    "intervention",
    "base",
    "measure",
    "effect_kind",
)
_OF_ONE_MODEL = "report.layers, report.neurons or the frame of `causal`"


def require(frame: pd.DataFrame, columns: Sequence[str], *, whole: str = _OF_ONE_MODEL) -> None:
    """Make sure that a frame has these columns, numbers in them, and rows.

    Args:
        frame: to draw from.
        columns: that it must have.
        whole: the frame that is meant, for the hint.

    Raises:
        BadOption: it has not.
    """
    absent = [name for name in columns if name not in frame]
    if absent:
        near = difflib.get_close_matches(absent[0], list(map(str, frame.columns)), n=3)
        raise BadOption(
            f"the frame has no column {absent[0]!r}",
            hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"Pass {whole} as it is",
        )
    if frame.empty:
        raise BadOption(
            "the frame has no rows: there is nothing to draw",
            hint="Give the frame of a report or a comparison as it is",
        )
    text = [name for name in columns if name not in _PLACES and not pd.api.types.is_numeric_dtype(frame[name])]
    if text:
        raise BadOption(f"column {text[0]!r} holds no numbers", hint="Name a column of numbers")


def nothing(names: str | Sequence[str]) -> BadOption:
    """That there is nothing to draw."""
    names = names if isinstance(names, str) else ", ".join(names)
    return BadOption(
        f"every value of {names} is missing: there is nothing to draw",
        hint="Give a frame in which they were measured; the notes of a report say why some were not",
    )


def only_activation(frame: pd.DataFrame | None) -> str:
    """The activation that a layer frame names.

    Raises:
        BadOption: it names none, or several.
    """
    named = set() if frame is None or "activation" not in frame else set(frame["activation"].dropna())
    if len(named) != 1:
        raise BadOption(
            "the activation is not known" if not named else f"the layers have several: {', '.join(sorted(named))}",
            hint='Pass activation="silu" or the like',
        )
    return named.pop()


def of_model(frame: pd.DataFrame, model: str | None) -> tuple[pd.DataFrame, str]:
    """The rows of one model of a comparison, and its name.

    Raises:
        BadOption: there is no such model; or there are several, and none is named.
    """
    names = list(dict.fromkeys(frame["model"].astype(str)))
    if model is None and len(names) > 1:
        raise BadOption(f"the frame has {len(names)} models beside the base", hint=f"Say which: {', '.join(names)}")
    model = model or names[0]
    if model not in names:
        raise BadOption(f"model is {model!r}", hint=f"Use one of {', '.join(names)}")
    return frame[frame["model"].astype(str) == model], model
