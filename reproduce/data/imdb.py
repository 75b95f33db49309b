"""IMDb reviews (Maas et al., 2011) as padded token ids, from a folder in any of two layouts, or through ``datasets``.

* Hugging Face's: ``train-*.parquet`` and ``test-*.parquet`` with columns ``text`` and ``label`` (in DIR or
``DIR/plain_text``); * compact: ``train_wordpiece512.npz`` and ``test_wordpiece512.npz`` with ``tokens`` (uint16, all
reviews one after another),
  ``lengths`` and ``labels``: BERT's uncased WordPiece ids.

Where there is only text, a word's id is a hash of it, in the same range: nothing is learned from the data to make ids.
A tokenizer's ids can be had instead.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lambdacgd.validation import InvalidInput
from reproduce.data.base import Examples, Splits, missing

VOCABULARY, PADDING, LENGTH = 30_522, 0, 256
_LAYOUTS = "train-*.parquet (Hugging Face) or train_wordpiece512.npz (compact)"
Tokenize = Callable[[list[str]], Tensor]  # texts -> ids, LENGTH of them a row
_WORD = re.compile(r"[a-z']+|[0-9]+|[.!?]")


def load(folder: Path | None = None, *, tokenize: Tokenize | None = None) -> Splits:
    """25 000 training and 25 000 test reviews: the first 256 tokens of each, padded with 0, publicly shuffled.

    ``tokenize`` makes ids of texts, where there is only text.
    """
    read = tokenize or _hashed
    if folder is not None:
        for inner in (folder, folder / "imdb", folder / "plain_text"):
            if (inner / "train_wordpiece512.npz").is_file():
                return Splits(_compact(inner, "train"), _compact(inner, "test"), 2)
            if list(inner.glob("train-*.parquet")):
                return Splits(_parquet(inner, "train", read), _parquet(inner, "test", read), 2)
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

        found = load_dataset("stanfordnlp/imdb")
    except (ImportError, OSError, ValueError, ConnectionError):
        raise missing("IMDb", folder, _LAYOUTS, "datasets") from None
    train, test = (_texts(list(found[one]["text"]), found[one]["label"], read) for one in ("train", "test"))
    return Splits(train, test, 2)


def _examples(rows: Tensor, labels: Tensor) -> Examples:
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))  # the files are ordered by class
    return Examples(rows[order], labels[order])


def _compact(folder: Path, split: str) -> Examples:
    content = np.load(folder / f"{split}_wordpiece512.npz")
    ends = np.cumsum(content["lengths"], dtype=np.int64)
    starts = ends - content["lengths"]
    rows = torch.full((len(ends), LENGTH), PADDING, dtype=torch.int32)
    tokens = torch.from_numpy(content["tokens"].astype(np.int32))
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        part = tokens[start : min(end, start + LENGTH)]
        rows[i, : len(part)] = part
    return _examples(rows, torch.from_numpy(content["labels"].astype(np.int64)))


def _parquet(folder: Path, split: str, read: Tokenize) -> Examples:
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
    return _texts(texts, labels, read)


def _texts(texts: list[str], labels: Iterable[int], read: Tokenize) -> Examples:
    return _examples(read(texts), torch.tensor(list(labels)))


def _hashed(texts: list[str]) -> Tensor:
    rows = []
    for text in texts:
        words = _WORD.findall(text.lower())[:LENGTH]
        ids = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
        rows.append(ids + [PADDING] * (LENGTH - len(ids)))
    return torch.tensor(rows, dtype=torch.int32)
