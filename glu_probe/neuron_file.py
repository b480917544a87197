"""The neuron frame in a parquet file: a row group for every layer, so that neither writing nor reading needs all of it.

The bytes depend on the rows alone, not on whether they came layer by layer or as one frame.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from .errors import NoReport


def by_layer(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of each layer, in order."""
    if "layer" not in frame or frame.empty:
        yield frame
        return
    place = frame["layer"].to_numpy()
    new = place[1:] != place[:-1]
    if "tower" in frame:
        tower = pd.factorize(frame["tower"])[0]
        new |= tower[1:] != tower[:-1]
    starts = [0, *(np.flatnonzero(new) + 1).tolist(), len(frame)]
    for start, stop in pairwise(starts):
        yield frame.iloc[start:stop]


def common_dtypes(frames: Iterable[pd.DataFrame]) -> dict[str, object]:
    """The dtype of every column of all these frames below each other."""
    dtypes: dict[str, object] = {}
    for frame in frames:
        for name, dtype in frame.dtypes.items():
            dtypes[name] = _common(dtypes.get(name, dtype), dtype)
    return dtypes


def _common(one: object, other: object) -> object:
    if isinstance(one, pd.CategoricalDtype):
        assert isinstance(other, pd.CategoricalDtype)  # a column is of one kind in all frames
        return pd.CategoricalDtype(one.categories.append(other.categories.difference(one.categories, sort=False)))
    if isinstance(one, np.dtype) and isinstance(other, np.dtype):
        return np.promote_types(one, other)
    return one


def write_neurons(path: Path, layers: Iterable[pd.DataFrame], dtypes: Mapping[str, object]) -> None:
    """Write frames below each other, a row group for each.

    Args:
        path: where.
        layers: the frames, with the same columns; one is in memory at a time.
        dtypes: what each column becomes; see `common_dtypes`.
    """
    import pyarrow as pa
    from pyarrow import parquet

    writer = None
    try:
        for frame in layers:
            frame = frame.astype(dict(dtypes)).reset_index(drop=True)
            schema = None if writer is None else writer.schema
            table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False).combine_chunks()
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table, row_group_size=max(len(table), 1))
    finally:
        if writer is not None:
            writer.close()


@dataclass
class NeuronFile:
    """A neuron frame that stays in its file until it is asked for.

    Attributes:
        path: the file.
        columns, rows: names of its columns, and how many rows it has.

    Raises:
        OSError, ValueError: when made, if there is no such parquet file.
    """

    path: Path
    columns: list[str] = field(init=False)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        from pyarrow import parquet

        self.path = Path(self.path).absolute()
        self._stamp = self._stat()
        with parquet.ParquetFile(self.path) as file:
            self.rows, self.columns = file.metadata.num_rows, file.schema_arrow.names

    def _stat(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def read(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The frame, or some of its columns.

        Raises:
            NoReport: the file is gone, or another one since this was made.
        """
        self._check()
        try:
            return pd.read_parquet(self.path, columns=None if columns is None else list(columns))
        except (OSError, ValueError) as error:
            raise self._lost(str(error).splitlines()[0]) from None

    def copy_to(self, path: Path) -> None:
        """Put a copy there: the same bytes on the disk under a second name where the file system has such."""
        self._check()
        try:
            os.link(self.path, path)
        except OSError:
            shutil.copyfile(self.path, path)

    def _check(self) -> None:
        try:
            same = self._stat() == self._stamp
        except OSError as error:
            raise self._lost(error.strerror or "it cannot be read") from None
        if not same:
            raise self._lost("it was written anew")

    def _lost(self, why: str) -> NoReport:
        return NoReport(
            f"the neurons of this report are no longer here ({why})", where=self.path, hint="Load the report again"
        )
