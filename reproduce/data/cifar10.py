"""CIFAR-10 from a folder, in any of three layouts, or through torchvision.

* torchvision's: ``cifar-10-batches-py/data_batch_1`` … ``data_batch_5``, ``test_batch`` (in DIR or as DIR itself); *
Hugging Face's: ``train-*.parquet`` and ``test-*.parquet`` with columns ``img`` and ``label`` (in DIR or
``DIR/plain_text``); * compact: ``train_1.webp`` … ``train_5.webp`` and ``test.webp``, lossless sheets of 100×100 tiles
of 32×32 pixels in row-major
  order, with ``labels.npz`` holding ``train_labels``, ``test_labels`` (uint8) and ``test_exact`` (bool: only these
  test images count).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lambdacgd.validation import InvalidInput
from reproduce.data.base import Examples, Splits, missing

_LAYOUTS = (
    "cifar-10-batches-py (torchvision), train-*.parquet (Hugging Face) or train_1.webp … with labels.npz (compact)"
)
Images = NDArray[np.uint8]


def load(folder: Path | None = None) -> Splits:
    """50 000 training and up to 10 000 test examples, pixels in [−1, 1], channels first."""
    if folder is not None:
        for inner in (folder, folder / "cifar-10-batches-py", folder / "cifar10", folder / "plain_text"):
            if (inner / "data_batch_1").is_file():
                return _splits(
                    *_batches(inner, [f"data_batch_{i}" for i in range(1, 6)]), *_batches(inner, ["test_batch"])
                )
            if (inner / "labels.npz").is_file() and (inner / "train_1.webp").is_file():
                return _compact(inner)
            if list(inner.glob("train-*.parquet")):
                return _splits(*_parquet(inner, "train"), *_parquet(inner, "test"))
    try:
        from torchvision.datasets import CIFAR10  # type: ignore[import-not-found, unused-ignore]

        root = str(folder or Path.home() / ".cache" / "lambdacgd" / "data")
        train, test = (CIFAR10(root, train=t, download=True) for t in (True, False))
    except (ImportError, RuntimeError, OSError):
        raise missing("CIFAR-10", folder, _LAYOUTS, "torchvision") from None
    return _splits(train.data, np.asarray(train.targets), test.data, np.asarray(test.targets))


def _splits(train: Images, train_labels: Any, test: Images, test_labels: Any) -> Splits:
    def examples(images: Images, labels: Any) -> Examples:
        channels_first = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        return Examples(channels_first, torch.as_tensor(np.asarray(labels)).long(), shift=127.5, scale=1 / 127.5)

    return Splits(examples(train, train_labels), examples(test, test_labels), 10)


class _PlainUnpickler(pickle.Unpickler):
    """The published batches hold dicts, lists, bytes and one NumPy array; nothing else is built."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype", "_frombuffer"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 batch")


def _batches(folder: Path, names: list[str]) -> tuple[Images, NDArray[np.int64]]:
    images, labels = [], []
    for name in names:
        try:
            with open(folder / name, "rb") as file:
                content = _PlainUnpickler(file, encoding="bytes").load()
            images.append(content[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(content[b"labels"], dtype=np.int64))
        except (OSError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise InvalidInput("data", str(folder / name), f"it is not a whole CIFAR-10 batch ({error})") from None
    return np.concatenate(images), np.concatenate(labels)


def _compact(folder: Path) -> Splits:
    labels = np.load(folder / "labels.npz")
    keep = labels["test_exact"]
    train = np.concatenate([_sheet(folder / f"train_{i}.webp") for i in range(1, 6)])
    return _splits(train, labels["train_labels"], _sheet(folder / "test.webp")[keep], labels["test_labels"][keep])


def _sheet(path: Path) -> Images:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # a sheet has ten million pixels on purpose
    pixels = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def _parquet(folder: Path, split: str) -> tuple[Images, NDArray[np.int64]]:
    try:
        import pyarrow.parquet as pq
        from PIL import Image
    except ImportError as error:
        raise InvalidInput(
            "data", str(folder), f"reading parquet needs {error.name}: pip install pyarrow Pillow"
        ) from None
    images, labels = [], []
    for path in sorted(folder.glob(f"{split}-*.parquet")):
        table = pq.read_table(path)
        names = table.column_names
        column = table.column("img" if "img" in names else "image").to_pylist()
        images += [np.asarray(Image.open(io.BytesIO(item["bytes"])).convert("RGB")) for item in column]
        labels += table.column("label").to_pylist()
    return np.stack(images), np.asarray(labels, dtype=np.int64)
