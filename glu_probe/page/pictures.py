"""Pictures of a page: what to draw, and the files that come of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import BadOption
from ..report import write_atomically

FULL, HALF = 11.0, 5.5  # inches: the width of a page's column, and of two pictures beside each other
_DPI = 150
_DPI_INSIDE = 100  # of what is an image inside a drawing: noise of points stays below a megabyte


@dataclass(frozen=True)
class Picture:
    """What to draw.

    Attributes:
        name: of its files, and its id in the page.
        title, caption: what it is, and how to read it.
        size: width and height in inches; as wide as `HALF` or less, and two stand beside each other.
        draw: takes Axes.
        shaded: whether light and dark stand for values: then they stay as they are where the page is dark.
    """

    name: str
    title: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Any], object]
    shaded: bool = False


@dataclass(frozen=True)
class Drawn:
    """A picture that was drawn, or why there is none.

    Attributes:
        picture: what was to be drawn.
        png, svg: the files, or None.
        reason: why there are none, or "".
    """

    picture: Picture
    png: bytes | None = None
    svg: bytes | None = None
    reason: str = ""

    @property
    def data(self) -> str:
        """The PNG in base64."""
        return base64.b64encode(self.png or b"").decode()

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height on a page, in CSS pixels."""
        width, height = self.picture.size
        return round(96 * width), round(96 * height)

    @property
    def classes(self) -> str:
        """Of its markup: half, if two stand beside each other; shaded, if its lightness is not to be turned round."""
        half = self.picture.size[0] <= HALF
        return " ".join(["half"] * half + ["shaded"] * self.picture.shaded)


def draw(pictures: Iterable[Picture]) -> tuple[list[Drawn], list[str]]:
    """Draw every picture; nothing is written.

    Returns:
        The pictures, and what went wrong, one sentence each. That there is nothing to draw goes into the picture alone.
    """
    drawn, troubles = [], []
    for picture in pictures:
        try:
            drawn.append(Drawn(picture, *render(picture.draw, picture.size)))
        except BadOption as error:
            drawn.append(Drawn(picture, reason=error.what))
        except Exception as error:  # whatever a plotting library raises must not cost the data
            reason = f"the figure could not be drawn: {type(error).__name__}: {error}"
            troubles.append(f"{picture.name}: {reason}")
            drawn.append(Drawn(picture, reason=reason))
    return drawn, troubles


def render(draw: Callable[[Any], object], size: tuple[float, float]) -> tuple[bytes, bytes]:
    """A figure as PNG and as SVG, without a display and without leaving a figure open.

    Args:
        draw: takes Axes.
        size: in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from ..figures import figure_axes

    ax = figure_axes(size)
    draw(ax)
    png, svg = io.BytesIO(), io.BytesIO()
    # neither the version of the plotting library nor the hour is part of the result
    figure = ax.figure
    assert isinstance(figure, Figure)  # the axes are new ones, in no figure's part
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    figure.set_layout_engine("none")  # what was placed stays where it is
    with mpl.rc_context({"svg.hashsalt": "glu-probe"}):  # names inside the file are the same in every run
        figure.savefig(svg, format="svg", dpi=_DPI_INSIDE, metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()


def drawing(figure: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], object]:
    """What draws a figure with these arguments on the axes that it is given."""
    return lambda ax: figure(*args, ax=ax, **options)


def save(drawn: Iterable[Drawn], directory: Path) -> None:
    """Write NAME.png and NAME.svg; files of a picture that could not be drawn this time are taken away."""
    for one in drawn:
        for ending, data in (("png", one.png), ("svg", one.svg)):
            path = directory / f"{one.picture.name}.{ending}"
            if data is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, partial(Path.write_bytes, data=data))
