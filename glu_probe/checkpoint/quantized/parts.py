"""What decoders of packed weights share: the scheme that the config names, the stored parts, and the weight they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from torch import Tensor

from ...errors import IncompleteTriple, QuantizedWeights, ShapeMismatch
from ..source import StoredSource, TensorInfo

UNQUANTISED = "Use the unquantised checkpoint"


@dataclass(frozen=True)
class Scheme:
    """How the config says that weights are packed.

    Attributes:
        method: its `quant_method`, None where it does not say.
        settings: the rest.
    """

    method: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a model's config, which may stand in its text part."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if isinstance(settings, Mapping) and settings:
                method = settings.get("quant_method")
                if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
                    method = "bitsandbytes"  # whose older versions did not say
                return Scheme(method if isinstance(method, str) else None, settings)
    return Scheme()


@dataclass(frozen=True)
class Packed:
    """A weight that is stored in parts.

    Attributes:
        name: what it would be called unpacked.
        scheme: in words.
        shape: unpacked.
        parts: names of the stored tensors that it takes the place of.
        rows: makes a range of its rows.
        rows_first: as in `TensorInfo`.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: Callable[[int, int], Tensor]
    rows_first: bool | None = None


class Parts:
    """The stored tensors of a source."""

    def __init__(self, source: StoredSource) -> None:
        self.infos: Mapping[str, TensorInfo] = source.infos()
        self._source = source
        self._held: tuple[tuple[str, ...], tuple[Tensor, ...]] = ((), ())

    def whole(self, name: str) -> Tensor:
        """All of a tensor as it is stored."""
        return self._source.stored(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A range of its rows as they are stored."""
        return self._source.stored(name, slice(start, stop))

    def held(self, *names: str) -> tuple[Tensor, ...]:
        """All of some tensors, kept until others are asked for.

        For formats of which every row of the weight lies scattered over the whole: a weight is read in some ten ranges
        of its rows, and these would each read all of it.
        """
        held = self._held
        if held[0] != names:
            held = self._held = (names, tuple(map(self.whole, names)))
        return held[1]

    def info(self, name: str, beside: str) -> TensorInfo:
        """A part's facts.

        Raises:
            IncompleteTriple: it is absent.
        """
        if name not in self.infos:
            raise IncompleteTriple(
                f"{name!r}, without which {beside!r} means nothing, is missing",
                where=self.infos[beside].file,
                hint="The checkpoint is incomplete: a shard may be missing, or the save went wrong",
            )
        return self.infos[name]

    def misfit(self, name: str, beside: str, expected: str) -> ShapeMismatch:
        """For a part whose shape does not go with the weight's."""
        found, whole = self.infos[name], self.infos[beside]
        return ShapeMismatch(
            f"{name!r} is {list(found.shape)}, which does not go with {beside!r} {list(whole.shape)}",
            where=found.file,
            hint=f"Expected {expected}: the file is damaged, or its config is of another model",
        )

    def sound(
        self,
        name: str,
        part: str,
        scales: Tensor,
        values: Tensor | None = None,
        spread: Callable[[Tensor], Tensor] = lambda scales: scales,
        *,
        signed: bool = False,
    ) -> Tensor:
        """The scales, if they can be what the quantiser wrote.

        A scale of 0 is written for a block of zeros. A negative one is written by some quantisers to integers, which
        reach one step further on that side.

        Args:
            name, part: of the weight, and of its scales.
            scales: as read.
            values: what they will be multiplied with; None to let zeros pass.
            spread: lays the scales over the values.
            signed: let negative ones pass.

        Raises:
            QuantizedWeights: they cannot.
        """
        low, high = (float(end) for end in scales.float().aminmax())
        if not (-inf < low and high < inf) or (low < 0 and not signed):
            worst = "a negative" if -inf < low <= high < inf else "an infinite" if low == low else "no number as"
            raise self.refused(name, f"has {worst} scale, in {part!r}")
        if low <= 0 and values is not None and bool(((spread(scales) == 0) & (values != 0)).any()):
            raise self.refused(name, f"has values that a scale of 0 erases, in {part!r}")
        return scales

    def refused(self, name: str, what: str) -> QuantizedWeights:
        """For a weight whose scheme has a form that is not decoded here."""
        return QuantizedWeights(f"{name!r} {what}", where=self.infos[name].file, hint=UNQUANTISED)
