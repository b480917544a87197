"""Numbers, layers and lists as the sentences of a report write them."""

from __future__ import annotations

import pandas as pd


def percent(value: float, form: str = ".0%") -> str:
    """A share as a percentage; what rounds to 0 has no sign."""
    text = f"{value:{form}}".replace("%", " %")
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


def span(values: pd.Series, form: str = ".3g") -> str:
    """From the lowest to the highest."""
    low, high = (percent(value, form) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def place(layers: pd.DataFrame, index: object) -> str:
    """A layer by name: with its stack and expert group where there are several."""
    row, words = layers.loc[index], f"layer {layers.loc[index, 'layer']}"
    if layers["tower"].nunique() > 1:
        words = f"{row['tower']} {words}"
    return words if layers["group"].nunique() < 2 else f"{words} ({row['group']})"


def several(names: list[str], at_most: int = 4) -> str:
    """Some of them by name, and how many more."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def listed(names: list[str]) -> str:
    """As "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def counted(number: int, noun: str) -> str:
    """As "1 sequence", "2 sequences", "1,000 sequences"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
