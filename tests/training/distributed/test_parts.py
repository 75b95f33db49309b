"""The small parts, in one process: how batches are split, where shards lie, what a bucket's tag notices."""

from __future__ import annotations

import itertools
import traceback

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.clipping.probe import fingerprints
from lambdacgd.errors import TrainingError
from lambdacgd.keys import SecretKey
from lambdacgd.training.distributed import reduction
from lambdacgd.training.distributed.models import Place
from lambdacgd.training.distributed.world import World
from lambdacgd.training.loop import cut
from lambdacgd.training.run import Run


def real(chunk):
    return len(chunk.indices) - chunk.padding


@given(st.integers(0, 40), st.integers(1, 7), st.one_of(st.none(), st.integers(1, 9)), st.integers(1, 6))
def test_every_example_is_on_one_rank_once(examples, ranks, size, multiple):
    found = np.arange(100, 100 + examples)
    parts = [list(cut(3, found, size, rank=rank, ranks=ranks, multiple=multiple)) for rank in range(ranks)]
    taken = [i for chunks in parts for chunk in chunks for i in chunk.indices[: real(chunk)]]
    assert sorted(taken) == found.tolist()
    assert len({len(chunks) for chunks in parts}) == 1  # ranks go through their parts together
    for together in zip(*parts, strict=True):
        assert len({chunk.last for chunk in together}) == 1
        assert {chunk.least for chunk in together} == {min(real(c) for c in together)}
        for chunk in together:
            rows = len(chunk.indices)
            assert 0 <= chunk.padding <= max(1, min(rows, multiple))
            assert rows % multiple == 0 if size is None or rows < size else rows == size
    assert [chunks[-1].last for chunks in parts] == [True] * ranks
    # Random augmentation is named by the chunk's place: no two ranks may share one.
    places = [chunk.first for chunks in parts for chunk in chunks]
    assert len(set(places)) == len(places)


@given(st.integers(1, 9), st.integers(0, 4), st.integers(1, 5))
def test_shards_tile_their_parameter(rows, columns, ranks):
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    places = [Place("w", (rows, columns), torch.float32, rank, ranks) for rank in range(ranks)]
    flat = torch.full((ranks, places[0].chunk + 2), -1.0)
    places[0].scatter_into(flat, 1, whole)
    expected = list(whole.chunk(ranks))  # as torch shards: whole rows, the last ranks may get none
    expected += [whole[:0]] * (ranks - len(expected))
    for place, part, sent in zip(places, expected, flat, strict=True):
        assert place.local_shape == tuple(part.shape)
        assert torch.equal(sent[1 : 1 + place.count].view(place.local_shape), part)
        if part.numel():
            assert float(part.flatten()[0]) == place.offset  # the row-major index that names the shard in the field


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=40))
def test_a_tag_notices_other_steps(places):
    received = torch.tensor([reduction.tag(step) for step in places]).sum(0)
    same = len({step % 32 for step in places}) == 1
    for step in places:
        if same:
            reduction.check_tag(received, step, len(places))
        else:
            with pytest.raises(TrainingError, match="drifted apart"):
                reduction.check_tag(received, step, len(places))


@given(st.integers(1, 10_000), st.data())
def test_ranks_that_part_are_noticed_at_once(step, data):
    """However long ranks go on from one place, steps with equal tags never meet before different ones have."""
    places = [step] * 3
    for _ in range(200):
        tags = [reduction.tag(t) for t in places]
        if any(tag != tags[0] for tag in tags):
            return  # refused on all ranks, and none goes on
        assert len(set(places)) == 1
        back = data.draw(st.lists(st.sampled_from([False] * 9 + [True]), min_size=3, max_size=3))
        places = [t if again else t + 1 for t, again in zip(places, back, strict=True)]


def test_a_tag_is_exact_for_thousands_of_ranks():
    received = torch.tensor(reduction.tag(31)) * 4096
    reduction.check_tag(received, 31, 4096)
    assert float(received[1] + 1) > float(received[1])  # float32 still counts here


def test_buckets_keep_within_their_size(monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 100)
    tensors = [torch.zeros(n, dtype=t) for n, t in itertools.product((3, 9, 20), (torch.float32, torch.float64))]
    buckets = reduction._buckets(tensors)
    assert sorted(id(t) for b in buckets for t in b) == sorted(map(id, tensors))
    for bucket in buckets:
        assert len({t.dtype for t in bucket}) == 1
        assert len(bucket) == 1 or sum(t.numel() * t.element_size() for t in bucket) <= 100
    assert reduction._buckets([]) == [[]]  # the tag travels anyway


def test_the_fingerprint_sees_a_bit_and_a_swap():
    p = [torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.bfloat16)]
    before = fingerprints(p)
    assert fingerprints(p) == before
    p[0].view(torch.int32)[7] ^= 1
    assert fingerprints(p) != before
    p[0].view(torch.int32)[7] ^= 1
    p[0][[1, 2]] = p[0][[2, 1]]
    assert fingerprints(p) != before


def test_one_process_alone_speaks_to_nobody():
    world = World()
    assert world.gather(3) == [3]
    assert world.share(3) == 3
    assert world.from_first("x", lambda: 3) == 3
    world.agree("x", {"a": 1}, {})
    assert world.share_secret(b"s" * 32, torch.device("cpu")) == b"s" * 32
    with pytest.raises(ValueError, match="own"), world.together("x"):
        raise ValueError("own")


def test_a_key_that_could_not_be_sent_is_in_no_traceback(monkeypatch):
    """A network that fails is ordinary, and so are tracebacks that show local variables."""
    key = SecretKey.generate()
    run = Run(key, world=World())
    run.world.size = 2

    def fails(*_, **__):
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "broadcast", fails)
    with pytest.raises(RuntimeError, match="connection reset") as caught:
        run.share(torch.device("cpu"))
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "box = tensor([0, 0, 0" in shown
    assert repr(bytes(key._secret))[2:-1] not in shown
