"""A source that shows plain weights where packed ones are stored, and unpacks the rows that are asked for.

What a weight is stored as is decided tensor by tensor: models leave some of their layers unquantised. The config's
`quant_method` decides only who may decode, because different schemes use the same names. What no decoder takes stays
as it is stored, for `packed.py` to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import GluProbeError
from ..packed import is_of_activations
from ..places import in_attention
from ..raw import RawMatrix
from ..source import StoredSource, TensorInfo, TensorSource
from .bitnet import bitnet
from .bnb import bnb_4bit, bnb_int8
from .compressed import compressed, signed_bytes, transformed, unreadable
from .fp4 import mxfp4
from .gptq import awq, gptq
from .parts import Packed, Parts, Scheme
from .scaled import fp4_in_int8, fp8

# Gives the weight that begins with a tensor, None if that tensor is none of its scheme's.
Decoder = Callable[[str, Parts, Scheme], Packed | None]

# Schemes whose tensors say by themselves all there is to know.
_SELF_DESCRIBING: tuple[Decoder, ...] = (fp8, mxfp4, bnb_4bit, bnb_int8)
_BY_METHOD: Mapping[str | None, tuple[Decoder, ...]] = {
    None: _SELF_DESCRIBING,
    "fp8": (fp8, fp4_in_int8),
    "fbgemm_fp8": (fp8,),
    "mxfp8": (fp8,),
    "mxfp4": (mxfp4, fp8),
    "compressed-tensors": (transformed, compressed, fp8, signed_bytes, unreadable),
    "bitsandbytes": (bnb_4bit, bnb_int8),
    "gptq": (gptq,),
    "awq": (awq,),
    "bitnet": (bitnet,),
}


def dequantised(source: StoredSource, scheme: Scheme) -> TensorSource:
    """The source itself if it holds nothing packed that can be decoded, or one that decodes it."""
    decoded = Dequantised(source, scheme)
    return decoded if decoded.infos() != source.infos() else source


class Dequantised:
    """Packed weights as plain ones. Parts that a decoder found wanting keep their names and carry the fault."""

    def __init__(self, source: StoredSource, scheme: Scheme) -> None:
        self._source, self._packed = source, {}
        stored, parts = source.infos(), Parts(source)
        found: dict[str, Packed] = {}
        faults: dict[str, GluProbeError] = {}
        decoders = _BY_METHOD.get(scheme.method, ())
        for name in stored if decoders else ():
            if in_attention(name):
                continue
            try:
                packed = next(filter(None, (decode(name, parts, scheme) for decode in decoders)), None)
                if packed is not None and packed.name != name and packed.name in stored:
                    raise parts.refused(name, f"is stored packed, and {packed.name!r} is there too")
            except GluProbeError as fault:
                faults[name] = fault
                continue
            if packed is not None:
                found[name] = packed
        for name, other in _unaccounted(stored, found):
            if name in found:
                scheme_words = found.pop(name).scheme
                faults[name] = parts.refused(
                    name, f"is stored as {scheme_words}, and what {other!r} beside it means is not known"
                )
        replaced = {part for packed in found.values() for part in packed.parts}
        self._infos: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            if name in found:
                packed = found[name]
                self._packed[packed.name] = packed
                self._infos[packed.name] = TensorInfo(
                    packed.name, packed.scheme, packed.shape, sum(stored[part].nbytes for part in packed.parts),
                    info.file, decoded=True, rows_first=packed.rows_first,
                )  # fmt: skip
            elif name not in replaced:
                self._infos[name] = replace(info, fault=faults[name]) if name in faults else info

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name; those that are made of parts instead of the parts."""
        return self._infos

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or a contiguous range of its rows, unpacked."""
        packed = self._packed.get(name)
        if packed is None:
            return self._source.read(name, rows)
        start, stop, _ = (rows or slice(None)).indices(packed.shape[0])
        if start >= stop:  # which not every library unpacks
            return torch.empty(0, *packed.shape[1:])
        return packed.rows(start, stop)

    def raw(self, name: str) -> RawMatrix | None:
        """Where in a local file a matrix lies that is not packed."""
        find = getattr(self._source, "raw", None)
        return None if find is None or name in self._packed else find(name)

    def provenance(self) -> dict[str, Any]:
        """The files."""
        return self._source.provenance()


def _unaccounted(stored: Iterable[str], found: Mapping[str, Packed]) -> Iterator[tuple[str, str]]:
    """Packed weights, and a part of theirs that no decoder has looked at: for a weight X, what is called X_part."""
    owners = {packed.name: name for name, packed in found.items()}
    parts = {part for packed in found.values() for part in packed.parts}
    for name in stored:
        for at, sign in enumerate(name):
            if sign == "_" and name[:at] in owners and name not in parts:
                if name[at + 1 :] != "bias" and not is_of_activations(name[at + 1 :]):
                    yield owners[name[:at]], name
                break
