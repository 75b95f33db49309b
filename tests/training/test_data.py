"""What is looked at in the user's data: repetitions, a collate_fn that mixes examples, whether it is still the same."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

import lambdacgd as lc
from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey
from lambdacgd.training import CheckpointError, privatize
from lambdacgd.training.data import KeepsApart, Sample, check_no_repeats, sample_of
from tests.training import oracle
from tests.training.saved import start, steps

# --- an example that is in a dataset twice is found, where torch's own wrappers or a selection put it there ----------


DATA, OTHER = oracle.data(), oracle.data()


class Selected:
    """As ``datasets.Dataset`` after ``select``: a table, and the rows that were chosen."""

    def __init__(self, rows):
        pyarrow = pytest.importorskip("pyarrow")
        self.data = pyarrow.table({"text": [*"abcdefghi"]})
        self._indices = None if rows is None else pyarrow.table({"indices": pyarrow.array(rows, pyarrow.uint64())})
        self.rows = rows or range(9)

    def select(self, rows):
        return Selected(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Table:
    """As ``datasets.Dataset`` over a table of pyarrow, of which parts may be put together without a copy."""

    def __init__(self, *parts):
        self.data = pytest.importorskip("pyarrow").concat_tables(parts)

    select = Selected.select

    def __len__(self):
        return self.data.num_rows

    def __getitem__(self, index):
        return self.data.column(0)[index].as_py()


def table():
    return pytest.importorskip("pyarrow").table({"text": ["a", "b", "a", None, "c", "d"], "label": range(6)})


@pytest.mark.parametrize(
    "make",
    [
        lambda t: Table(t, t),  # concatenate_datasets([data, data]), data.repeat(2)
        lambda t: Table(t, t.slice(2, 1)),
        lambda t: Table(t.slice(0, 3), t.slice(2)),
        lambda t: ConcatDataset([Table(t), Table(t.slice(3))]),
        lambda t: Subset(Table(t), [1, 1]),
    ],
)
def test_repetitions_of_a_table_that_is_put_together_are_refused(make):
    """Oversampling as Hugging Face datasets do it: the rows lie in the same memory."""
    with pytest.raises(lc.InvalidInput, match="times"):
        check_no_repeats(make(table()))


def test_tables_whose_rows_are_their_own_are_fine():
    t = table()
    check_no_repeats(Table(t))
    check_no_repeats(Table(t.slice(3), t.slice(0, 3), table()))
    check_no_repeats(ConcatDataset([Table(t), Table(table())]))
    check_no_repeats(Subset(Table(t), [5, 1]))
    check_no_repeats(Table(t.slice(0, 0)))
    check_no_repeats(Table(t.select(["label"]).set_column(0, "none", [[None] * 6])))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Subset(DATA, [0, 3, 5, 3, 3]), r"example 3 3 times \(2 repetitions\)"),
        (lambda: Subset(DATA, np.array([0, 3, 3])), "example 3 2 times"),
        (lambda: Subset(DATA, [0, len(DATA) - 1, -1]), f"example {len(DATA) - 1} 2 times"),
        (lambda: ConcatDataset([DATA, DATA]), "example 0 2 times"),
        (lambda: ConcatDataset([Subset(DATA, [1, 2]), OTHER, Subset(DATA, [2])]), "example 2 2 times"),
        (lambda: Subset(ConcatDataset([OTHER, DATA]), [len(OTHER) + 4, 1, len(OTHER) + 4]), "example 4 2 times"),
        (lambda: Subset(Subset(DATA, [7, 8, 9]), [0, 0]), "example 7 2 times"),
        (lambda: Selected([4, 4, 1]), "example 4 2 times"),
        (lambda: Subset(Selected([4, 5, 1]), [1, 1]), "example 5 2 times"),
    ],
)
def test_repetitions_are_refused(make, says):
    with pytest.raises(InvalidInput, match=says):
        check_no_repeats(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DATA,
        lambda: [1, 1, 1],  # equal, but three
        lambda: Subset(DATA, range(9, 2, -1)),
        lambda: ConcatDataset([DATA, OTHER]),
        lambda: ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [3])]),
        lambda: Subset(ConcatDataset([DATA, OTHER]), [1, len(DATA) + 1]),
        lambda: Selected(None),
        lambda: Selected([3, 1, 2]),
        lambda: ConcatDataset([Selected([3, 1]), Selected([3, 1])]),  # of two tables, as far as anybody can tell
        lambda: Subset(DATA, []),
    ],
)
def test_everything_once_is_fine(make):
    check_no_repeats(make())


def test_at_the_door(tmp_path):
    with pytest.raises(InvalidInput, match="Give each example once"):
        start(tmp_path, dataset=Subset(DATA, [0] * len(DATA)))


# --- a collate_fn that mixes examples is refused; one that pads, sorts or masks at random is not ---------------------


ITEMS = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(6)]


def mixup(items):
    """As torchvision's: each row with the one before it."""
    x, y = default_collate(items)
    part = float(torch.distributions.Beta(0.4, 0.4).sample())
    return part * x + (1 - part) * x.roll(1, 0), y


def cutmix(items):
    x, y = default_collate(items)
    other = torch.randperm(len(x))
    x = x.clone()
    x[:, 2:] = x[other, 2:]
    return x, y


def centred(items):
    x, y = default_collate(items)
    return {"inputs": [x - x.mean(0)], "labels": y}


def negatives(items):
    """Each example with another one of the batch, which it is not to be like."""
    x, _ = default_collate(items)
    return {"positive": x, "negative": x.flip(0)}


def repeats_the_first(items):
    return default_collate([items[0]] * len(items))


def draws_with_replacement(items):
    return default_collate(random.choices(items, k=len(items)))


def padded_and_mixed(items):
    batch = pads(items)
    return batch | {"other": batch["x"].flip(0)}


def test_mixing_is_seen_where_the_last_example_is_the_longest():
    items = sorted(ITEMS, key=lambda item: float(item[0][0].abs()))
    assert len({pads(items[:k])["x"].shape[1] for k in (3, 4)}) == 2
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        KeepsApart(padded_and_mixed)(items[:4])


@pytest.mark.parametrize("mixes", [mixup, cutmix, centred, negatives, repeats_the_first, draws_with_replacement])
@pytest.mark.parametrize("size", [2, 6])
def test_mixing_is_refused(mixes, size):
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        KeepsApart(mixes)(ITEMS[:size])


def sorts(items):
    return default_collate(sorted(items, key=lambda item: float(item[0].sum())))


def pads(items):
    """Lengths of their own, so that shapes depend on all examples; padding on the left moves every row."""
    longest = max(1 + int(x[0].abs() * 4) for x, _ in items)
    rows = [F.pad(x[: 1 + int(x[0].abs() * 4)], (longest - len(x[: 1 + int(x[0].abs() * 4)]), 0)) for x, _ in items]
    return {"x": torch.stack(rows), "y": torch.tensor([y for _, y in items])}


def masks(items):
    x, y = default_collate(items)
    return x.masked_fill(torch.rand_like(x) < 0.3, 0.0), y


def crops(items):
    """As many random numbers as the example decides; rows after it see others, and rows before it do not."""
    rows = []
    for x, _ in items:
        for _ in range(1 + int(x[0].abs() * 3)):
            shift = random.randrange(3)
        rows.append(x.roll(shift))
    return torch.stack(rows)


def objects(items):
    return items, np.array([y for _, y in items]), "text"


def takes_labels_out(items):
    """As some collators of transformers do: the items are not the same afterwards."""
    batch = [{"x": x, "label": y} for x, y in items] if isinstance(items[0], tuple) else items
    labels = [item.pop("label") for item in batch]
    return {"x": torch.stack([item["x"] for item in batch]), "labels": torch.tensor(labels), "none": torch.ones(6, 0)}


def test_items_that_a_collator_changes():
    items = [{"x": x, "label": y} for x, y in ITEMS]
    assert KeepsApart(takes_labels_out)(items)["labels"].tolist() == [y for _, y in ITEMS]


def strange(items):
    x, y = default_collate(items)
    return {
        "sparse": x.to_sparse(), "text": np.array(["a"] * len(x)), "objects": np.array([None] * len(x)),
        "bits": x > 0, "half": x.bfloat16(), "complex": torch.complex(x, x), "scalar": torch.tensor(1), "y": y,
    }  # fmt: skip


def fails_on_few(items):
    if len(items) < 6:
        raise ValueError("too few")
    return default_collate(items)


def test_what_cannot_be_collated_again_is_let_alone():
    assert torch.equal(KeepsApart(fails_on_few)(ITEMS)[0], default_collate(ITEMS)[0])
    with pytest.raises(ValueError, match="too few"):
        KeepsApart(fails_on_few)(ITEMS[:3])


def flattens(items):
    return torch.cat([x for x, _ in items])[None]


@pytest.mark.parametrize(
    "fine", [default_collate, sorts, pads, masks, crops, objects, flattens, takes_labels_out, strange]
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_what_keeps_examples_apart_passes_and_moves_no_random_numbers(fine, size):
    def everything():
        return [random.random(), np.random.rand(), torch.rand(3).tolist()]  # noqa: NPY002

    results = []
    for collate in (fine, KeepsApart(fine)):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        results.append((repr(collate(ITEMS[:size])), everything(), repr(collate(ITEMS[:size]))))
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_looks(workers):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    private = privatize(
        module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, collate_fn=mixup, num_workers=workers
    )
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        next(iter(private.loader))
    assert private.steps_taken == 0


@pytest.mark.parametrize("options", [{"pad_batches": 8}, {"augmentations": 2}])
def test_an_order_of_its_own_is_refused_where_places_mean_something(options):
    """What fills a batch up repeats its first example at weight zero: behind a sort that weight met another row, and
    the first example counted up to eight times. Views of several examples were averaged as if they were one's.
    """
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, collate_fn=sorts, **options)
    with pytest.raises(lc.TrainingError, match="changes the order of examples"):
        next(iter(private.loader))


@pytest.mark.parametrize("fine", [default_collate, pads, masks, crops, objects, takes_labels_out, strange])
def test_what_keeps_the_order_passes(fine):
    for size in (1, 2, 6):
        KeepsApart(fine, in_order=True)(ITEMS[:size])


@pytest.mark.parametrize("first", [3, 50, 700])
def test_mixing_that_begins_later_is_seen(first):
    """A warm-up without mixup."""
    batches = 0

    def late(items):
        return (mixup if batches >= first else default_collate)(items)

    collate = KeepsApart(late)
    for batches in range(1, first):  # noqa: B007  (`late` reads it)
        collate(ITEMS)
    batches = first
    with pytest.raises(lc.TrainingError, match="collate_fn mixes examples"):
        [collate(ITEMS) for _ in range(65)]


# --- a run goes on with the examples that it began with, in their order ----------------------------------------------


KEY = SecretKey.from_bytes(bytes(range(32)))


def saved(folder, **options):
    private = start(folder, **options)
    steps(private, 2)
    private.save(folder / "c")
    private.detach()


def shuffled(seed):
    data = oracle.data()
    return Subset(data, torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist())


def test_a_dataset_shuffled_anew_is_refused(tmp_path):
    saved(tmp_path, dataset=shuffled(1))
    with pytest.raises(CheckpointError, match="in another order"):
        start(tmp_path, dataset=shuffled(2)).load(tmp_path / "c")
    again = start(tmp_path, dataset=shuffled(1))
    again.load(tmp_path / "c")
    assert again.steps_taken == 2


def test_who_names_the_data_vouches_for_it(tmp_path):
    saved(tmp_path, dataset=shuffled(1))
    private = start(tmp_path, dataset=shuffled(2), data_fingerprint="the same, decoded otherwise")
    private.load(tmp_path / "c")
    assert private.steps_taken == 2


class Noisy(Dataset):
    """Random numbers of its own, which nobody can set."""

    def __init__(self):
        self.inner, self.reads = oracle.data(), 0
        self.random = np.random.default_rng()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.reads += 1
        x, y = self.inner[index]
        return x + float(self.random.random()), y


def test_reading_that_is_random_tells_nothing(tmp_path):
    saved(tmp_path, dataset=Noisy())
    private = start(tmp_path, dataset=Noisy())
    private.load(tmp_path / "c")
    assert private.steps_taken == 2


def test_where_workers_read_this_process_does_not(tmp_path):
    data = Noisy()
    private = start(tmp_path, dataset=data, num_workers=1)
    private.save(tmp_path / "c")
    assert data.reads == 0


def test_seals_tell_nothing_without_the_key():
    data = oracle.data()
    seals = [Sample(data, readable=True).seal(KEY, run) for run in ("one", "two")]
    assert seals[0] != seals[1]  # of two runs on the same data
    assert sample_of(data) not in repr(seals)
    for run, seal in zip(("one", "two"), seals, strict=True):
        Sample(data, readable=True).check(seal, KEY, run)
        with pytest.raises(CheckpointError):
            Sample(data, readable=True).check(seal, SecretKey.from_bytes(bytes(32)), run)


def test_every_kind_of_item_counts():
    pillow = pytest.importorskip("PIL.Image")
    item = {
        "tensor": torch.ones(2, 2), "array": np.arange(3), "list": [1, "a", None, (2.5, b"b")],
        "image": pillow.new("RGB", (2, 2)),
    }  # fmt: skip
    other = {name: copy.deepcopy(value) for name, value in item.items()}
    assert sample_of([item]) == sample_of([other]) is not None
    other["image"].putpixel((0, 0), (1, 0, 0))
    assert sample_of([item]) != sample_of([other])
    assert sample_of([item | {"set": {1, 2}}]) is None  # its order is the process's own
