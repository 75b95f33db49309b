"""The data sets that experiments train on: digits (no download), CIFAR-10 and IMDb (from a folder or a library)."""

from __future__ import annotations

import io
import pickle
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lambdacgd import digits
from lambdacgd.errors import InvalidInput

_CIFAR10_LAYOUTS = (
    "cifar-10-batches-py (torchvision), train-*.parquet (Hugging Face) or train_1.webp … with labels.npz (compact)"
)
Images = NDArray[np.uint8]
VOCABULARY, PADDING, LENGTH = 30_522, 0, 256
_IMDB_LAYOUTS = "train-*.parquet (Hugging Face) or train_wordpiece512.npz (compact)"
Tokenize = Callable[[list[str]], Tensor]  # texts -> ids, LENGTH of them a row
_WORD = re.compile(r"[a-z']+|[0-9]+|[.!?]")


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and labels in memory, read singly or many at once. Images kept as bytes become float32 when read."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, shift: float = 0.0, scale: float = 1.0) -> None:
        if len(inputs) != len(labels):
            raise InvalidInput("labels", len(labels), f"there must be one for each of the {len(inputs)} inputs")
        self.inputs, self.labels, self.shift, self.scale = inputs, labels, shift, scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.numbers(self.inputs[index]), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        chosen = torch.as_tensor(indices)
        return list(zip(self.numbers(self.inputs[chosen]).unbind(0), self.labels[chosen].unbind(0), strict=True))

    def numbers(self, x: Tensor) -> Tensor:
        """Stored inputs as the model takes them: bytes become float32."""
        return x.float().sub_(self.shift).mul_(self.scale) if x.dtype == torch.uint8 else x

    def part(self, indices: Tensor | slice) -> Examples:
        """Some of the examples, in the order given."""
        return Examples(self.inputs[indices], self.labels[indices], shift=self.shift, scale=self.scale)


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Examples with their numbers, of which random views are made."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *self.examples[index], index

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor, int]]:
        read = self.examples.__getitems__(indices)
        return [(x, y, index) for (x, y), index in zip(read, indices, strict=True)]


@dataclass(frozen=True)
class Splits:
    """Training and test examples of one data set."""

    train: Examples
    test: Examples
    classes: int


def missing(name: str, folder: Path | None, layouts: str, library: str) -> InvalidInput:
    """The error of a data set that is neither here nor can be fetched."""
    where = "nothing was given" if folder is None else str(folder)
    return InvalidInput(
        "data",
        where,
        f"{name} was not found there. Give --data DIR with {layouts}; or install {library} to download it",
    )


def load_digits(folder: Path | None = None) -> Splits:
    """The handwritten digits that come with the package: 1 437 training and 360 test examples, pixels in [−1, 1].

    Args:
        folder: Not used: the digits need no files.
    """
    train, test = digits.load()
    return Splits(Examples(*train.tensors), Examples(*test.tensors), 10)


def load_cifar10(folder: Path | None = None) -> Splits:
    """CIFAR-10: 50 000 training and up to 10 000 test examples, pixels in [−1, 1], channels first.

    Args:
        folder: Where the files are, in one of three layouts, in the folder or one below it. torchvision's:
            ``data_batch_1`` … ``data_batch_5`` and ``test_batch``. Hugging Face's: ``train-*.parquet`` and
            ``test-*.parquet`` with columns ``img`` and ``label``. Compact: ``train_1.webp`` … ``train_5.webp`` and
            ``test.webp``, lossless sheets of 100×100 tiles of 32×32 pixels in row-major order, with ``labels.npz``
            holding ``train_labels``, ``test_labels`` (uint8) and ``test_exact`` (bool: only these test images count).
            Where there is none of them, torchvision downloads the data set, if it is installed.

    Raises:
        InvalidInput: The data set is not there, or a file of it is damaged.
    """
    if folder is not None:
        for inner in (folder, folder / "cifar-10-batches-py", folder / "cifar10", folder / "plain_text"):
            if (inner / "data_batch_1").is_file():
                return _cifar10_splits(
                    *_cifar10_batches(inner, [f"data_batch_{i}" for i in range(1, 6)]),
                    *_cifar10_batches(inner, ["test_batch"]),
                )
            if (inner / "labels.npz").is_file() and (inner / "train_1.webp").is_file():
                return _cifar10_sheets(inner)
            if list(inner.glob("train-*.parquet")):
                return _cifar10_splits(*_cifar10_parquet(inner, "train"), *_cifar10_parquet(inner, "test"))
    try:
        from torchvision.datasets import CIFAR10  # type: ignore[import-not-found, unused-ignore]

        root = str(folder or Path.home() / ".cache" / "lambdacgd" / "data")
        train, test = (CIFAR10(root, train=t, download=True) for t in (True, False))
    except (ImportError, RuntimeError, OSError):
        raise missing("CIFAR-10", folder, _CIFAR10_LAYOUTS, "torchvision") from None
    return _cifar10_splits(train.data, np.asarray(train.targets), test.data, np.asarray(test.targets))


def _cifar10_splits(train: Images, train_labels: Any, test: Images, test_labels: Any) -> Splits:
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


def _cifar10_batches(folder: Path, names: list[str]) -> tuple[Images, NDArray[np.int64]]:
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


def _cifar10_sheets(folder: Path) -> Splits:
    labels = np.load(folder / "labels.npz")
    keep = labels["test_exact"]
    train = np.concatenate([_sheet(folder / f"train_{i}.webp") for i in range(1, 6)])
    return _cifar10_splits(
        train, labels["train_labels"], _sheet(folder / "test.webp")[keep], labels["test_labels"][keep]
    )


def _sheet(path: Path) -> Images:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # a sheet has ten million pixels on purpose
    pixels = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def _cifar10_parquet(folder: Path, split: str) -> tuple[Images, NDArray[np.int64]]:
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


def load_imdb(folder: Path | None = None, *, tokenize: Tokenize | None = None) -> Splits:
    """IMDb reviews (Maas et al., 2011): 25 000 training and 25 000 test examples, publicly shuffled.

    A review is the ids of its first 256 tokens, padded with 0.

    Args:
        folder: Where the files are, in one of two layouts, in the folder or one below it. Hugging Face's:
            ``train-*.parquet`` and ``test-*.parquet`` with columns ``text`` and ``label``. Compact:
            ``train_wordpiece512.npz`` and ``test_wordpiece512.npz`` with ``tokens`` (uint16, all reviews one after
            another), ``lengths`` and ``labels``: BERT's uncased WordPiece ids. Where there is neither of them,
            ``datasets`` downloads the reviews, if it is installed.
        tokenize: Makes ids of texts, where there is only text. By default a word's id is a hash of it, in the same
            range as BERT's: nothing is learned from the data to make ids.

    Raises:
        InvalidInput: The data set is not there, or pyarrow is needed to read it and is not installed.
    """
    read = tokenize or _hashed_words
    if folder is not None:
        for inner in (folder, folder / "imdb", folder / "plain_text"):
            if (inner / "train_wordpiece512.npz").is_file():
                return Splits(_imdb_pieces(inner, "train"), _imdb_pieces(inner, "test"), 2)
            if list(inner.glob("train-*.parquet")):
                return Splits(_imdb_parquet(inner, "train", read), _imdb_parquet(inner, "test", read), 2)
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

        downloaded = load_dataset("stanfordnlp/imdb")
    except (ImportError, OSError, ValueError, ConnectionError):
        raise missing("IMDb", folder, _IMDB_LAYOUTS, "datasets") from None
    train, test = (
        _imdb_texts(list(downloaded[split]["text"]), downloaded[split]["label"], read) for split in ("train", "test")
    )
    return Splits(train, test, 2)


def _shuffled(rows: Tensor, labels: Tensor) -> Examples:
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))  # the files are ordered by class
    return Examples(rows[order], labels[order])


def _imdb_pieces(folder: Path, split: str) -> Examples:
    content = np.load(folder / f"{split}_wordpiece512.npz")
    ends = np.cumsum(content["lengths"], dtype=np.int64)
    starts = ends - content["lengths"]
    rows = torch.full((len(ends), LENGTH), PADDING, dtype=torch.int32)
    tokens = torch.from_numpy(content["tokens"].astype(np.int32))
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        part = tokens[start : min(end, start + LENGTH)]
        rows[i, : len(part)] = part
    return _shuffled(rows, torch.from_numpy(content["labels"].astype(np.int64)))


def _imdb_parquet(folder: Path, split: str, read: Tokenize) -> Examples:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise InvalidInput("data", str(folder), "reading parquet needs pyarrow: pip install pyarrow") from None
    texts: list[str] = []
    labels: list[int] = []
    for path in sorted(folder.glob(f"{split}-*.parquet")):
        table = pq.read_table(path)
        texts += table.column("text").to_pylist()
        labels += table.column("label").to_pylist()
    return _imdb_texts(texts, labels, read)


def _imdb_texts(texts: list[str], labels: Iterable[int], read: Tokenize) -> Examples:
    return _shuffled(read(texts), torch.tensor(list(labels)))


def _hashed_words(texts: list[str]) -> Tensor:
    rows = []
    for text in texts:
        words = _WORD.findall(text.lower())[:LENGTH]
        ids = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
        rows.append(ids + [PADDING] * (LENGTH - len(ids)))
    return torch.tensor(rows, dtype=torch.int32)
