"""Every file that this package reads may hold anything: it becomes a valid object or our own error, with a sentence.

Never another traceback, never code that runs, never memory or time that the file decides. ``LAMBDACGD_FUZZ=5000``
tries more.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.errors import CheckpointError, InvalidInput, KeyFileError, LedgerError
from lambdacgd.files import parse_json
from lambdacgd.ledger import Ledger, _checksum
from lambdacgd.planning import _digest
from lambdacgd.training import checkpoint
from lambdacgd.training.card import History
from tests import fuzzing
from tests.training import oracle, saved

fuzzed = settings(max_examples=fuzzing.EXAMPLES, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def refused(*errors: type[Exception]):
    """Nothing but these errors comes out of the block, and what they say is a sentence of bounded length."""
    try:
        yield
    except errors as error:
        said = str(error)
        assert re.search(r"\w+ \w+.* \w+", said), said
        assert len(said) < 2000, said[:200]
        said.encode()  # a terminal must be able to show it


def resealed(plan):
    if isinstance(plan, dict):
        plan.pop("digest", None)
        plan["digest"] = _digest(plan)
    return plan


PLANS = [
    oracle.plan(),
    oracle.binned_plan(60, 15, 5, bins="fresh"),
    oracle.plan(mechanism=lc.BandInvMF(2)),
    oracle.plan(mechanism=lc.BLT(1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=[p.mechanism.name for p in PLANS])
@fuzzed
@given(data=st.data())
def test_plan_files(plan, tmp_path_factory, data):
    content = data.draw(fuzzing.files(plan.to_json().encode(), sealed=resealed))
    path = tmp_path_factory.getbasetemp() / "plan.json"
    path.write_bytes(content)
    with refused(InvalidInput):
        read = lc.Plan.load(path)
        assert math.isfinite(read.sigma)
        assert str(read)
        assert lc.Plan.from_json(read.to_json()).digest == read.digest
        read.check()


@fuzzed
@given(data=st.data())
def test_key_files(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed.key"
    path.unlink(missing_ok=True)
    oracle.key().save(path)
    good = path.read_bytes()
    path.write_bytes(data.draw(fuzzing.files(good)))
    with refused(KeyFileError):
        key = lc.SecretKey.load(path)
        assert key == oracle.key()  # a checksum: what loads is what was saved
        assert path.read_bytes() == good


def ledger_file(folder: Path) -> tuple[bytes, str]:
    (folder / "good.ledger").unlink(missing_ok=True)
    ledger = Ledger(folder / "good.ledger")
    run = ledger.new_run(plan="abc")
    ledger.record(run, 3, digest="one")
    ledger.record(run, 5, digest="two")
    ledger.declare_destroyed(run, 3)
    ledger.record(run, 4, digest="three", kind="export")
    return (folder / "good.ledger").read_bytes(), run


def resealed_lines(content: bytes, draw: Random) -> bytes:
    """The ledger with one record edited and all checksums put right: what a program with our code could write."""
    check, lines = "", []
    records = [json.loads(line) for line in content.splitlines()]
    chosen = draw.randrange(len(records))
    for index, record in enumerate(records):
        if index == chosen:
            record = fuzzing.edited(record, draw)
        if isinstance(record, dict):
            record.pop("check", None)
            record["check"] = check = _checksum(check, record)
        lines.append(json.dumps(record, sort_keys=True).encode() + b"\n")
    return b"".join(lines)


@fuzzed
@given(data=st.data())
def test_ledgers(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    good, run = ledger_file(folder)
    edits = st.randoms(use_true_random=False).map(lambda draw: resealed_lines(good, draw))
    path = folder / "fuzzed.ledger"
    path.write_bytes(data.draw(fuzzing.files(good) | edits))
    for act in (
        lambda ledger: ledger.runs(),
        lambda ledger: ledger.newest(run),
        lambda ledger: ledger.check_resume(run, 4, "three"),
        lambda ledger: ledger.record(run, 6, digest="four"),
        lambda ledger: ledger.new_run(),
        lambda ledger: ledger.declare_destroyed(run, 1),
    ):
        with refused(LedgerError):
            act(Ledger(path))


@fuzzed
@given(data=st.data())
def test_cache_entries(tmp_path_factory, data):
    """A question is answered as it was computed, whatever stands in the folder."""
    folder = tmp_path_factory.getbasetemp() / "cache-fuzzed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMBDACGD_CACHE", str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        assert cache.cached("sigma", {"n": 1}, lambda: {"sigma": 2.5}) == {"sigma": 2.5}
        (entry,) = folder.glob("*.json")
        where = data.draw(st.sampled_from([entry, folder / ".secret"]))
        where.write_bytes(data.draw(fuzzing.files(where.read_bytes())))
        assert cache.cached("sigma", {"n": 1}, lambda: {"sigma": 2.5}) == {"sigma": 2.5}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A run's folder with a key, a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("released")
    private = saved.start(folder)
    saved.steps(private, 2)
    private.save(folder / "checkpoint", extra={"note": [1, 2.5, "x"], "big": 2**70})
    lc.export(private, folder / "export")
    private.detach()
    return folder


@fuzzed
@given(data=st.data())
def test_privacy_cards(released, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "privacy-card.json"
    path.write_bytes(data.draw(fuzzing.files((released / "export" / "privacy-card.json").read_bytes())))
    with refused(InvalidInput):
        history = History.of([path])
        assert all(epsilon >= 0 and 0 <= delta <= 1 for epsilon, delta in history.runs)
        assert History.from_dict(json.loads(json.dumps(asdict(history)))) == history
        assert history.text


FILES = ("run.json", "whole.safetensors")


@pytest.mark.parametrize("name", FILES)
@fuzzed
@given(data=st.data())
def test_checkpoints(released, tmp_path_factory, name, data):
    folder = tmp_path_factory.getbasetemp() / "run-fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(released, folder)
    (path,) = (folder / "checkpoint").glob(f"step-*/{name}")
    good = path.read_bytes()
    content = data.draw(fuzzing.files(good))
    path.write_bytes(content)
    with refused(CheckpointError):
        read = checkpoint.read(folder / "checkpoint")
        assert set(read) == {"step", "model", "optimizer", "averages", "extra"}
    private = saved.start(folder)
    before = oracle.weights(private.model)
    try:
        with refused(CheckpointError):
            private.load(folder / "checkpoint")
            assert content == good  # the ledger knows its digest
    finally:
        if content != good:
            assert all(torch.equal(value, before[key]) for key, value in oracle.weights(private.model).items())
        private.detach()


class Touch:
    """What a planted pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@fuzzed
@given(data=st.data())
def test_noiser_states(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "noiser-fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    key = oracle.key()
    key.save(folder / "run.key")
    noiser = lc.Noiser(oracle.plan(), key)
    noiser.batch()
    noiser.add({"w": torch.zeros(3)})
    good = noiser.state_dict()
    noiser.run.close()
    content = data.draw(fuzzing.files(json.dumps(good).encode()))
    try:
        state = json.loads(content)
    except (ValueError, RecursionError):
        state = content
    again = lc.Noiser(oracle.plan(), lc.SecretKey.load(folder / "run.key"))
    with refused(CheckpointError):
        again.load_state_dict(state)
        assert state == good
        again.run.close()


SPARSE = 512 << 20


@pytest.mark.parametrize("reader", ["plan", "key", "ledger", "card", "cache", "checkpoint"])
def test_a_file_does_not_decide_how_much_is_read(reader, released, tmp_path, monkeypatch):
    """Half a gigabyte of zeros, which takes no room on the disk, takes little in memory."""
    shutil.copytree(released, tmp_path / "run")
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path / "cache"))
    cache.cached("sigma", {"n": 1}, lambda: 1.0)
    monkeypatch.setattr("lambdacgd.training.checkpoint.MOST_JSON", 1 << 20)
    (facts,) = tmp_path.glob("run/checkpoint/step-*/run.json")
    (entry,) = tmp_path.glob("cache/*.json")
    paths = {"key": tmp_path / "run" / "run.key", "checkpoint": facts, "cache": entry}
    path = paths.get(reader, tmp_path / "large")
    with open(path, "wb") as file:
        file.truncate(SPARSE)
    path.chmod(0o600)
    readers = {
        "plan": lambda: lc.Plan.load(path),
        "key": lambda: lc.SecretKey.load(path),
        "ledger": lambda: Ledger(path).runs(),
        "card": lambda: History.of([path]),
        "cache": lambda: cache.cached("sigma", {"n": 1}, lambda: 1.0),
        "checkpoint": lambda: checkpoint.read(tmp_path / "run" / "checkpoint"),
    }
    tracemalloc.start()
    try:
        if reader == "cache":
            assert readers[reader]() == 1.0
        else:
            with pytest.raises((InvalidInput, KeyFileError, LedgerError, CheckpointError)):
                readers[reader]()
        assert tracemalloc.get_traced_memory()[1] < SPARSE // 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"a": 1, "a": 2}', "'a' stands there twice"), ("[NaN]", "NaN is not a number"), ("1e999", "too large"),
     ("[" * 100_000, "nested too deeply"), (b"\xff", "byte 0 is not UTF-8"), ("-Infinity", "not a number")],
    ids=["twice", "nan", "large", "deep", "bytes", "infinity"],
)  # fmt: skip
def test_json_means_one_thing(text, told):
    with pytest.raises(ValueError, match=told):
        parse_json(text)
