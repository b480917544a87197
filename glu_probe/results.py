"""The result of measuring one MLP as bytes, and back: every bit of it, and no code."""

from __future__ import annotations

import io
import json

import numpy as np

from .frames import LayerResult

_ARRAYS = ("neurons", "flags", "nulls")
_FACTS = (
    "tower", "layer", "expert", "group", "d_model", "d_mlp", "activation", "scalars", "methods", "note", "samples",
    "oddities",
)  # fmt: skip


def encode(result: LayerResult) -> bytes:
    """A zip archive of arrays, with what is no array as JSON among them."""
    arrays = {f"{kind} {name}": values for kind in _ARRAYS for name, values in getattr(result, kind).items()}
    facts = json.dumps({name: getattr(result, name) for name in _FACTS}, default=float)
    buffer = io.BytesIO()
    np.savez(buffer, facts=np.frombuffer(facts.encode(), dtype=np.uint8), **arrays)
    return buffer.getvalue()


def decode(body: bytes) -> LayerResult:
    """What `encode` was given."""
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        facts = json.loads(archive["facts"].tobytes())
        arrays: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _ARRAYS}
        for entry in archive.files:
            kind, _, name = entry.partition(" ")
            if name:
                arrays[kind][name] = archive[entry]
    return LayerResult(**facts | arrays | {"oddities": tuple(facts["oddities"])})
