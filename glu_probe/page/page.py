"""A page with its pictures, as text or on its way to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..report import write_text
from .pictures import Drawn, Picture, draw, save


@dataclass(frozen=True)
class Page:
    """What a page is made of.

    Attributes:
        name: of its file.
        pictures: to draw, once.
        markup: HTML around what was drawn.
    """

    name: str
    pictures: Iterable[Picture]
    markup: Callable[[Sequence[Drawn]], str]

    def html(self) -> str:
        """The page, self-contained; nothing is written."""
        return self.markup(draw(self.pictures)[0])

    def write(self, directory: Path) -> list[str]:
        """Write figures/NAME.png and figures/NAME.svg of every picture, then the page.

        Args:
            directory: which is there.

        Returns:
            What went wrong with pictures, one sentence each.
        """
        drawn, troubles = draw(self.pictures)
        (directory / "figures").mkdir(exist_ok=True)
        save(drawn, directory / "figures")
        write_text(directory / self.name, self.markup(drawn))
        return troubles
