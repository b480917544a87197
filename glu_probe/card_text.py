"""A neuron's card as text of 100 columns, and as tables for a notebook."""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .measures.neighbours import FACTORS

if TYPE_CHECKING:
    import pandas as pd

    from .card import NeuronCard

_WIDTH = 100
_CELL = 31  # three columns and what stands between them
_SIGNS = {
    "plus_plus": "a > 0, b > 0",
    "plus_minus": "a > 0, b < 0",
    "minus_plus": "a < 0, b > 0",
    "minus_minus": "a < 0, b < 0",
}
_GAUGE = "* a choice of coordinates: says nothing by itself"
_SIGN_OF_K = (
    "k and v flipped together so that E[ab] >= 0 on isotropic input: the signs of k and v mean that of the pair"
)


def card_text(card: NeuronCard) -> str:
    """The card as text, at most 100 columns wide."""
    parts = [_head(card), _measures(card), _neighbours(card), _tokens(card), _contexts(card), _tail(card)]
    return "\n\n".join(part for part in parts if part)


def card_html(card: NeuronCard) -> str:
    """The card as tables."""
    out = [
        f"<h4>{html.escape(_head(card))}</h4>",
        _table(card.measures.assign(gauge=card.measures["gauge"].map({True: "", False: "*"}))),
    ]
    out.append(f"<p>{_GAUGE}</p>")
    for title, frame in (
        ("Nearest neighbours", card.neighbours),
        (f"Tokens ({_SIGN_OF_K})", card.tokens),
        ("Contexts", card.contexts),
    ):
        if len(frame):
            out.append(f"<details><summary>{html.escape(title)}</summary>{_table(frame)}</details>")
    said = [*_reasons(card), *(f"note: {note}" for note in card.notes)]
    return "\n".join((*out, *(f"<p>{html.escape(line)}</p>" for line in said)))


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, na_rep="–", float_format=lambda value: f"{value:.4g}")


def _head(card: NeuronCard) -> str:
    flags = f" [{', '.join(card.flags)}]" if card.flags else ""
    return f"{card.model}, {card.place}: {card.io_class or 'no class'}{flags}"


def _measures(card: NeuronCard) -> str:
    lines = [f"{'measure':<20} {'value':>12} {'layer median':>14} {'percentile':>11}"]
    for row in card.measures.itertuples():
        below = "-" if row.percentile != row.percentile else f"{row.percentile:.0f}"
        name = row.measure + ("" if row.gauge else " *")
        lines.append(f"{name:<20} {_number(row.value):>12} {_number(row.layer_median):>14} {below:>11}")
    return "\n".join((*lines, _GAUGE))


def _neighbours(card: NeuronCard) -> str:
    if not len(card.neighbours):
        return ""
    columns = []
    for factor in FACTORS:
        rows = card.neighbours[card.neighbours["factor"] == factor]
        column = [factor, *(f"{row.cosine:+.3f}  neuron {row.neighbour}" for row in rows.itertuples())]
        if len(rows):
            column += [
                f" {rows['typical'].iloc[0]:.3f}  typical of the layer",
                f" {rows['null'].iloc[0]:.3f}  by chance",
            ]
        columns.append(column)
    title = (
        "Nearest neighbours by |cosine| (the neighbour's k and v flipped together so that the cosine of k is positive)"
    )
    return "\n".join((*_wrapped(title), *_beside(columns)))


def _tokens(card: NeuronCard) -> str:
    if not len(card.tokens):
        return ""
    lines = _wrapped(f"Tokens by cosine ({_SIGN_OF_K})")
    for side, sign in (("top", "+"), ("bottom", "-")):
        columns = []
        for factor, verb in zip(FACTORS, ("reads", "reads", "writes"), strict=True):
            rows = card.tokens[(card.tokens["factor"] == factor) & (card.tokens["side"] == side)]
            column = [f"{factor} {verb} {sign}"]
            column += [f"{row.cosine:+.3f}  {_short(row.token, _CELL - 8)}" for row in rows.itertuples()]
            column += [f"{rows['null'].iloc[0]:+.3f}  by chance"] if len(rows) else ["not available"]
            columns.append(column)
        lines += [*([""] if side == "bottom" else []), *_beside(columns)]
    return "\n".join(lines)


def _contexts(card: NeuronCard) -> str:
    if not len(card.contexts):
        return ""
    lines = ["Contexts by |S(a) b|, b in the canonical gauge of the text: the value, [the token], its window"]
    for quadrant, rows in card.contexts.groupby("quadrant", sort=False):
        lines.append(_SIGNS[quadrant])
        for row in rows.itertuples():
            start = f"  {row.value:>+10.4g}  [{_short(_visible(row.token), 20)}]  "
            lines.append(start + _short(_visible(row.window), _WIDTH - len(start)))
    return "\n".join(lines)


def _tail(card: NeuronCard) -> str:
    return "\n".join(
        line for text in (*_reasons(card), *(f"note: {note}" for note in card.notes)) for line in _wrapped(text)
    )


def _reasons(card: NeuronCard) -> Iterator[str]:
    """Why parts are missing, each reason once."""
    reasons: dict[str, list[str]] = {}
    for part, reason in card.missing.items():
        reasons.setdefault(reason, []).append(part)
    for reason, parts in reasons.items():
        yield f"{', '.join(parts)}: not available because {reason}"


def _beside(columns: list[list[str]]) -> list[str]:
    height = max(map(len, columns))
    cells = [[_padded(cell) for cell in (*column, *[""] * (height - len(column)))] for column in columns]
    return [f"  {'  '.join(row)}".rstrip() for row in zip(*cells, strict=True)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _visible(text: str) -> str:
    """On one line: what cannot be printed is escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _columns(text: str) -> int:
    """How many columns of a terminal it takes."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _padded(cell: str) -> str:
    return cell + " " * max(0, _CELL - _columns(cell))


def _short(text: str, width: int) -> str:
    """As much of a text as fits."""
    if _columns(text) <= width:
        return text
    while _columns(text) > width - 3:
        text = text[:-1]
    return f"{text}..."


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.4g}"
