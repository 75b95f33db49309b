"""Data sets sorted by bin on disk: training reads each step's batch as one run of rows, without a shuffle.

A data set too large for memory is sorted once, by any engine that can sort (DuckDB, Spark SQL), on the column of
bins that ``BallsInBins.bin_of`` computes shard by shard. Needs ``pyarrow``, imported when first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.keys import SecretKey
from lambdacgd.sampling.balls_in_bins import BallsInBins
from lambdacgd.sampling.base import DEFAULT_RUN, Indices


class BinSortedParquet:
    """A Parquet file whose rows are sorted by the column ``bin``, read row by row or bin by bin.

    A map-style data set: ``len(data)``, ``data[i]`` (a dict of row ``i`` of the file) and ``data.fetch(indices)``
    (many rows, each row group read once). ``rows(step)`` are the rows of a step: a contiguous run, found from bin
    offsets that are computed once from the ``bin`` column alone. Bins are secret: keep the file as private as the data.

    Guarantee
    ---------
    The file is checked against ``sampling`` when opened: N rows, bins within 0 … b−1, in order. That the bins are
    those of the key is checked by ``verify``.
    """

    def __init__(
        self, path: str | Path, sampling: BallsInBins, *, bin_column: str = "bin", id_column: str = "id"
    ) -> None:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ImportError("reading Parquet files needs pyarrow: pip install pyarrow") from error
        if sampling.bins != "fixed":
            raise InvalidInput(
                "sampling",
                f"balls-in-bins with {sampling.bins} bins",
                "one order on disk serves fixed bins only, and fresh bins need a new one every epoch. Plan with "
                "sampling=lc.BallsInBins('fixed'), or train from a data set that reads any row (fresh bins need no "
                "sorting there)",
            )
        self.path, self.sampling = Path(path), sampling
        self._bin_column, self._id_column = bin_column, id_column
        self._file = pyarrow.parquet.ParquetFile(self.path)
        names = self._file.schema_arrow.names
        if bin_column not in names:
            raise InvalidInput("bin_column", bin_column, f"{self.path} has the columns {', '.join(names)}")
        if (rows := self._file.metadata.num_rows) != sampling.examples:
            raise InvalidInput("path", str(path), f"it has {rows} rows and the sampling {sampling.examples} examples")
        counts = np.zeros(sampling.steps_per_epoch, dtype=np.int64)
        last = -1
        for batch in self._file.iter_batches(columns=[bin_column]):
            bins = batch.column(0).to_numpy(zero_copy_only=False)
            if not len(bins):
                continue
            if bins.min() < 0 or bins.max() >= sampling.steps_per_epoch:
                raise InvalidInput(bin_column, int(bins.max()), f"bins go from 0 to {sampling.steps_per_epoch - 1}")
            if bins[0] < last or (np.diff(bins) < 0).any():
                raise InvalidInput("path", str(path), f"its rows must be sorted by {bin_column}: ORDER BY {bin_column}")
            last = int(bins[-1])
            counts += np.bincount(bins, minlength=sampling.steps_per_epoch)
        self.offsets: Indices = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        groups = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._group_starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self._cached: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.sampling.examples

    def __getitem__(self, row: int) -> dict[str, Any]:
        integer("row", row, minimum=0, maximum=len(self) - 1)
        found: dict[str, Any] = self.fetch(np.array([row])).to_pylist()[0]
        return found

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Many rows at once, as torch's data loader asks for them."""
        found: list[dict[str, Any]] = self.fetch(np.asarray(rows)).to_pylist()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes open the file themselves."""
        opened = partial(BinSortedParquet, bin_column=self._bin_column, id_column=self._id_column)
        return opened, (self.path, self.sampling)

    def rows(self, step: int) -> range:
        """The rows of the file that step ``step`` (1 … n) trains on; an empty range for an empty bin."""
        integer("step", step, maximum=self.sampling.steps, why=": the horizon is fixed")
        place = (step - 1) % self.sampling.steps_per_epoch
        return range(int(self.offsets[place]), int(self.offsets[place + 1]))

    def batches(self, *, start_step: int = 1) -> Iterator[Indices]:
        """The rows of each step as index arrays, like ``BallsInBins.batches`` in the file's own numbering."""
        for step in range(start_step, self.sampling.steps + 1):
            rows = self.rows(step)
            yield np.arange(rows.start, rows.stop)

    def fetch(self, rows: Indices) -> Any:
        """The given rows as a pyarrow Table, in the order given."""
        import pyarrow

        rows = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(self._group_starts, rows, side="right") - 1
        tables, positions = [], []
        for group in np.unique(groups):
            where = np.flatnonzero(groups == group)
            tables.append(self._group(int(group)).take(rows[where] - self._group_starts[group]))
            positions.append(where)
        if not tables:
            return self._file.schema_arrow.empty_table()
        return pyarrow.concat_tables(tables).take(np.argsort(np.concatenate(positions), kind="stable"))

    def verify(self, key: SecretKey, *, run: str = DEFAULT_RUN) -> None:
        """Check every row against the key: an error if the file was sorted with another key or run, or an id is not
        there exactly once (two rows of one id would share a bin, and one would give the other's away).

        Takes one byte of memory an example.
        """
        seen = np.zeros(self.sampling.examples, dtype=bool)
        for batch in self._file.iter_batches(columns=[self._id_column, self._bin_column]):
            ids, bins = (
                batch.column(name).to_numpy(zero_copy_only=False) for name in (self._id_column, self._bin_column)
            )
            if (self.sampling.bin_of(key, ids, run=run) != bins).any():
                raise InvalidInput(
                    "path",
                    str(self.path),
                    "its bins are not those of this key, run and number of steps. Prepare a run with "
                    "key.ledger().new_run(), sort by its bins, and give its id to privatize",
                )
            if seen[ids].any() or len(np.unique(ids)) < len(ids):
                raise InvalidInput(
                    "path", str(self.path), f"an {self._id_column} stands in it twice; every example has one of its own"
                )
            seen[ids] = True

    def _group(self, group: int) -> Any:
        if self._cached is None or self._cached[0] != group:  # neighbouring steps share a row group
            self._cached = (group, self._file.read_row_group(group))
        return self._cached[1]
