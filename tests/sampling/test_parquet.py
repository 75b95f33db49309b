"""A data set sorted by bin with DuckDB, as docs/sampling.md shows it, and read back for training."""

from pathlib import Path

import numpy as np
import pytest

from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey
from lambdacgd.sampling import BallsInBins, BinSortedParquet

duckdb = pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

KEY = SecretKey.from_bytes(bytes(32))
SAMPLING = BallsInBins("fixed", examples=5000, steps_per_epoch=64, epochs=2)


@pytest.fixture(scope="module")
def sorted_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(4)
    ids = rng.permutation(5000)
    for shard in range(3):  # three machines could do this: nobody needs to know of the others
        mine = ids[shard::3]
        table = pa.table({"id": mine, "value": mine.astype(np.float64) ** 2, "text": [f"row {i}" for i in mine]})
        pq.write_table(table.append_column("bin", pa.array(SAMPLING.bin_of(KEY, mine))), folder / f"{shard}.parquet")
    target = folder / "sorted.parquet"
    duckdb.sql(
        f"COPY (SELECT * FROM read_parquet('{folder}/[0-9].parquet') ORDER BY bin, id) "
        f"TO '{target}' (FORMAT parquet, ROW_GROUP_SIZE 2048)"
    )
    return target


def test_steps_read_what_the_sampler_says(sorted_file: Path) -> None:
    data = BinSortedParquet(sorted_file, SAMPLING)
    data.verify(KEY)
    assert len(data) == 5000
    for step, (rows, batch) in enumerate(zip(data.batches(), SAMPLING.batches(KEY), strict=True), start=1):
        assert data.rows(step) == range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else not data.rows(step)
        if step <= 64:
            table = data.fetch(rows)
            assert table["id"].to_pylist() == batch.tolist()
            assert table["value"].to_pylist() == (batch.astype(float) ** 2).tolist()


def test_rows_come_back_in_the_order_asked_for(sorted_file: Path) -> None:
    data = BinSortedParquet(sorted_file, SAMPLING)
    rows = np.array([4999, 0, 2500, 2047, 2048, 0])
    assert data.fetch(rows).to_pylist() == [data[int(row)] for row in rows]
    assert data.fetch(np.array([], dtype=np.int64)).num_rows == 0


def test_an_udf_can_compute_the_bins_inside_the_engine(sorted_file: Path) -> None:
    connection = duckdb.connect()

    def bins(ids: object) -> object:
        return pa.array(SAMPLING.bin_of(KEY, ids.to_numpy()))  # type: ignore[attr-defined]

    connection.create_function("bin_of", bins, ["BIGINT"], "BIGINT", type="arrow")
    wrong = connection.sql(f"SELECT count(*) FROM '{sorted_file}' WHERE bin_of(id) != bin").fetchall()
    assert wrong == [(0,)]


@pytest.mark.parametrize("group", [2, 5000])
def test_an_id_that_comes_twice_is_refused(tmp_path: Path, group: int) -> None:
    ids = np.array([*range(9), 0])
    bins = BallsInBins("fixed", examples=10, steps_per_epoch=4, epochs=1).bin_of(KEY, ids)
    order = np.argsort(bins, kind="stable")
    pq.write_table(pa.table({"id": ids[order], "bin": bins[order]}), tmp_path / "twice.parquet", row_group_size=group)
    with pytest.raises(InvalidInput, match="twice"):
        BinSortedParquet(
            tmp_path / "twice.parquet", BallsInBins("fixed", examples=10, steps_per_epoch=4, epochs=1)
        ).verify(KEY)


def test_fresh_bins_have_no_one_order(sorted_file: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"fresh bins need a new one every epoch. Plan with sampling=lc.BallsInBins\('fixed'\)"
    ):
        BinSortedParquet(sorted_file, BallsInBins("fresh", examples=5000, steps_per_epoch=64, epochs=2))


def test_a_file_that_does_not_fit_is_refused(sorted_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="5000 rows, and the sampling 4000"):
        BinSortedParquet(sorted_file, BallsInBins("fixed", examples=4000, steps_per_epoch=64, epochs=2))
    with pytest.raises(InvalidInput, match="Bins go from 0 to 9"):
        BinSortedParquet(sorted_file, BallsInBins("fixed", examples=5000, steps_per_epoch=10, epochs=2))
    with pytest.raises(InvalidInput, match="has no column bucket"):
        BinSortedParquet(sorted_file, SAMPLING, bin_column="bucket")
    with pytest.raises(InvalidInput, match="not those of this key"):
        BinSortedParquet(sorted_file, SAMPLING).verify(SecretKey.from_bytes(bytes(31) + b"x"))
    shuffled = tmp_path / "shuffled.parquet"
    pq.write_table(pa.table({"id": [0, 1], "bin": [1, 0]}), shuffled)
    with pytest.raises(InvalidInput, match="not sorted by bin: ORDER BY bin"):
        BinSortedParquet(shuffled, BallsInBins("fixed", examples=2, steps_per_epoch=2, epochs=1))
