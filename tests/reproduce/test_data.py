"""The readers, on small files of each layout."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch

import lambdacgd as lc
from reproduce import data
from reproduce.data import Examples

RNG = np.random.default_rng(4)


def test_digits():
    splits = data.load_digits()
    assert (len(splits.train), len(splits.test), splits.classes) == (1437, 360, 10)
    x, y = splits.train[3]
    assert x.shape == (1, 8, 8)
    assert -1 <= float(x.min()) < float(x.max()) <= 1
    again = splits.train.__getitems__([3, 5])
    assert torch.equal(again[0][0], x)
    assert again[0][1] == y
    assert torch.equal(data.load_digits().train.inputs, splits.train.inputs)


def check_cifar(splits, images, labels):
    assert len(splits.train) == 10
    for i in (0, 7):
        x, y = splits.train[i]
        assert x.shape == (3, 32, 32)
        expected = torch.from_numpy(images[i].transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)
        torch.testing.assert_close(x, expected, atol=1e-6, rtol=1e-6)
        assert int(y) == labels[i]


def test_cifar10_in_torchvisions_layout(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    images = RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    labels = list(range(10))
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        part = images[2 * i : 2 * i + 2] if i < 5 else images[:2]
        content = {
            b"data": part.transpose(0, 3, 1, 2).reshape(-1, 3072),
            b"labels": labels[2 * i : 2 * i + 2] or [0, 1],
        }
        (folder / name).write_bytes(pickle.dumps(content))
    check_cifar(data.load_cifar10(tmp_path), images, labels)
    check_cifar(data.load_cifar10(folder), images, labels)
    (folder / "data_batch_2").write_bytes(b"cut off")
    with pytest.raises(lc.InvalidInput, match="not a whole CIFAR-10 batch"):
        data.load_cifar10(tmp_path)


def test_a_batch_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(lc.InvalidInput, match="does not belong"):
        data.load_cifar10(tmp_path)


def test_cifar10_in_the_compact_layout(tmp_path):
    image = pytest.importorskip("PIL.Image")
    images = RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    for name, part in [(f"train_{i + 1}", images[2 * i : 2 * i + 2]) for i in range(5)] + [("test", images[:4])]:
        rows = max(1, len(part) // 2)
        sheet = part.reshape(rows, 2, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(rows * 32, 64, 3)
        image.fromarray(sheet).save(tmp_path / f"{name}.webp", lossless=True)
    labels = np.arange(10, dtype=np.uint8)
    np.savez(
        tmp_path / "labels.npz",
        train_labels=labels,
        test_labels=labels[:4],
        test_exact=np.array([True, False, True, True]),
    )
    splits = data.load_cifar10(tmp_path)
    check_cifar(splits, images, labels)
    assert splits.test.labels.tolist() == [0, 2, 3]
    assert torch.equal(splits.test.inputs[1], torch.from_numpy(images[2].transpose(2, 0, 1)))


def test_cifar10_in_hugging_faces_layout(tmp_path):
    image, pa, pq = (pytest.importorskip(name) for name in ("PIL.Image", "pyarrow", "pyarrow.parquet"))
    folder = tmp_path / "plain_text"
    folder.mkdir()
    images = RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)

    def png(pixels):
        out = io.BytesIO()
        image.fromarray(pixels).save(out, "PNG")
        return {"bytes": out.getvalue(), "path": None}

    for split, rows in (("train", images), ("test", images[:2])):
        table = pa.table({"img": [png(x) for x in rows], "label": list(range(len(rows)))})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    check_cifar(data.load_cifar10(tmp_path), images, list(range(10)))


def test_imdb_in_the_compact_layout(tmp_path):
    lengths = np.array([3, 300, 2], dtype=np.uint16)
    tokens = np.arange(1, 306, dtype=np.uint16)
    for split in ("train", "test"):
        np.savez(
            tmp_path / f"{split}_wordpiece512.npz", tokens=tokens, lengths=lengths, labels=np.array([0, 1, 1], np.uint8)
        )
    splits = data.load_imdb(tmp_path)
    rows = {tuple(row[row != data.PADDING].tolist()): int(y) for row, y in (splits.train[i] for i in range(3))}
    assert rows == {(1, 2, 3): 0, tuple(range(4, 4 + data.LENGTH)): 1, (304, 305): 1}


def test_imdb_in_hugging_faces_layout(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in ("train", "test"):
        table = pa.table({"text": ["A good film.", "A bad, bad film!"], "label": [1, 0]})
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    splits = data.load_imdb(tmp_path)
    by_label = {int(y): x for x, y in (splits.train[i] for i in range(2))}
    good, bad = by_label[1], by_label[0]
    assert good[0] == bad[0] != data.PADDING  # the same word
    assert bad[1] == bad[2] != good[1]
    assert int((good != data.PADDING).sum()) == 4
    assert int(bad.max()) < data.VOCABULARY


@pytest.mark.parametrize("reader", [data.load_cifar10, data.load_imdb])
def test_nothing_there(reader, tmp_path, monkeypatch):
    for library in ("torchvision", "torchvision.datasets", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(lc.InvalidInput, match=r"was not found there. Give --data DIR with .*; or install"):
        reader(tmp_path)
    with pytest.raises(lc.InvalidInput, match="nothing was given"):
        reader(None)


def test_labels_that_do_not_fit():
    with pytest.raises(lc.InvalidInput, match="labels"):
        Examples(torch.zeros(3, 2), torch.zeros(2))
