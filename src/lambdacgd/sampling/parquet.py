"""Data sets sorted by bin on disk: training reads each step's batch as one run of rows, without a shuffle.

A data set too large for memory is sorted once, by any engine that can sort (DuckDB, Spark SQL), on the column of
bins that ``BallsInBins.bin_of`` computes shard by shard. Needs ``pyarrow``, imported when first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lambdacgd.errors import InvalidInput, brief, integer
from lambdacgd.keys import SecretKey
from lambdacgd.sampling.samplings import DEFAULT_RUN, BallsInBins, Indices


class BinSortedParquet:
    """A Parquet file whose rows are sorted by the column ``bin``, read row by row or bin by bin.

    A map-style data set: ``len(data)``, ``data[i]`` (a dict of row ``i`` of the file) and ``data.fetch(indices)``
    (many rows, each row group read once). ``rows(step)`` are the rows of a step: a contiguous stretch, looked up in bin
    offsets that are computed once from the ``bin`` column alone. Bins are secret: keep the file as private as the data.

    Args:
        path: the Parquet file.
        sampling: the plan's sampling, with fixed bins.
        bin_column: the name of the column of bins.
        id_column: the name of the column of example ids, which ``verify`` reads.

    Raises:
        ImportError: pyarrow is not installed.
        InvalidInput: the file is not sorted by the bins of such a sampling, or the bins are fresh ones.

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
                "One order on disk serves fixed bins only, and fresh bins need a new one every epoch. Plan with "
                "sampling=lc.BallsInBins('fixed'), or train from a data set that reads any row (fresh bins need no "
                "sorting there).",
            )
        self.path, self.sampling = Path(path), sampling
        self._bin_column, self._id_column = bin_column, id_column
        with self._reading():
            self._file = pyarrow.parquet.ParquetFile(self.path)
            names = self._file.schema_arrow.names
        if bin_column not in names:
            raise InvalidInput("bin_column", f"{self.path} has no column {bin_column}, but {brief(', '.join(names))}.")
        if (rows := self._file.metadata.num_rows) != sampling.examples:
            raise InvalidInput("path", f"{path} has {rows} rows, and the sampling {sampling.examples} examples.")
        counts = np.zeros(sampling.steps_per_epoch, dtype=np.int64)
        last = -1
        for (bins,) in self._columns(bin_column):
            if bins.min() < 0 or bins.max() >= sampling.steps_per_epoch:
                raise InvalidInput(
                    "path",
                    f"Bins go from 0 to {sampling.steps_per_epoch - 1}, and {path} has {bins.min()} to {bins.max()}.",
                )
            if bins[0] < last or (np.diff(bins) < 0).any():
                raise InvalidInput("path", f"The rows of {path} are not sorted by {bin_column}: ORDER BY {bin_column}.")
            last = int(bins[-1])
            counts += np.bincount(bins, minlength=sampling.steps_per_epoch)
        if counts.sum() != rows:
            raise InvalidInput("path", f"{path} is damaged: {counts.sum()} of its {rows} rows can be read.")
        self.offsets: Indices = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        groups = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._group_starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self._cached: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.sampling.examples

    def __getitem__(self, row: int) -> dict[str, Any]:
        integer("row", row, minimum=0, maximum=len(self) - 1)
        example: dict[str, Any] = self.fetch(np.array([row])).to_pylist()[0]
        return example

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Many rows at once, as torch's data loader asks for them."""
        examples: list[dict[str, Any]] = self.fetch(np.asarray(rows)).to_pylist()
        return examples

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes open the file themselves."""
        opened = partial(BinSortedParquet, bin_column=self._bin_column, id_column=self._id_column)
        return opened, (self.path, self.sampling)

    def rows(self, step: int) -> range:
        """Look up which rows of the file a step trains on.

        Args:
            step: 1 … n.

        Returns:
            A stretch of rows, empty for an empty bin.

        Raises:
            InvalidInput: the step is beyond the horizon.
        """
        integer("step", step, maximum=self.sampling.steps, why=": the horizon is fixed")
        place = (step - 1) % self.sampling.steps_per_epoch
        return range(int(self.offsets[place]), int(self.offsets[place + 1]))

    def batches(self, *, start_step: int = 1) -> Iterator[Indices]:
        """The rows of each step as index arrays, like ``BallsInBins.batches`` in the file's own numbering."""
        for step in range(start_step, self.sampling.steps + 1):
            rows = self.rows(step)
            yield np.arange(rows.start, rows.stop)

    def fetch(self, rows: Indices) -> Any:
        """Read rows, each row group once.

        Args:
            rows: row numbers, in any order.

        Returns:
            A pyarrow Table of these rows, in the order given.

        Raises:
            InvalidInput: the file is damaged.
        """
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
        """Check every row against the key. Takes one byte of memory per example.

        Args:
            key: the secret key.
            run: the run's id.

        Raises:
            InvalidInput: the file was sorted with another key or for another run, or an id is not there exactly once
                (two rows of one id would share a bin, and one would give the other's away).
        """
        seen = np.zeros(self.sampling.examples, dtype=bool)
        for ids, bins in self._columns(self._id_column, self._bin_column):
            if (self.sampling.bin_of(key, ids, run=run) != bins).any():
                raise InvalidInput(
                    "path",
                    f"The bins in {self.path} are not those of this key, run and number of steps. Prepare a run with "
                    "key.ledger().new_run(), sort by its bins, and give its id to privatize.",
                )
            if seen[ids].any() or len(np.unique(ids)) < len(ids):
                raise InvalidInput(
                    "path", f"An {self._id_column} is twice in {self.path}: every example has one of its own."
                )
            seen[ids] = True

    def _columns(self, *names: str) -> Iterator[tuple[Indices, ...]]:
        """Columns of integers, batch by batch. Signed ones: differences of unsigned integers are never negative."""
        present = self._file.schema_arrow
        for name in names:
            if name not in present.names:
                raise InvalidInput("path", f"{self.path} has no column {name}, but {brief(', '.join(present.names))}.")
            kind = str(present.field(name).type)
            if kind.removeprefix("u") not in ("int8", "int16", "int32", "int64"):
                raise InvalidInput("path", f"The column {name} of {self.path} must hold integers, not {brief(kind)}.")
        with self._reading():
            for batch in self._file.iter_batches(columns=list(names)):
                if any(column.null_count for column in batch.columns):
                    raise InvalidInput("path", f"A row of {self.path} has no {' or no '.join(names)}.")
                if batch.num_rows:
                    yield tuple(batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64) for name in names)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Whatever pyarrow says of a damaged file is one error with a sentence."""
        import pyarrow

        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise InvalidInput("path", f"{self.path} is damaged, or no Parquet file ({brief(error)}).") from error

    def _group(self, group: int) -> Any:
        if self._cached is None or self._cached[0] != group:  # neighbouring steps share a row group
            with self._reading():
                self._cached = (group, self._file.read_row_group(group))
        return self._cached[1]
