"""The secret key: derivation as a format, secrecy, its file."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd import keys
from lambdacgd.keys import DestroyedKeyError, KeyFileError, SecretKey, keystream, prf64, scattered_blocks
from tests.faults import fault

SECRET = bytes(range(1, 33))
# Computed apart from the library (hashlib and OpenSSL alone); they must never change.
GOLDEN_PRF = [
    "6a19c5d97d2bfd39",
    "494adcb87703bd8d",
    "0c415b48a06227c2",
    "d1a6e6ad3142b818",
    "085e19b46bb5cc20",
    "6aa6c2f15fa7e2fb",
    "6425c3343c7984e3",
    "89ddfce7a29f2385",
    "27c71c7b6262b8ae",
]
GOLDEN_SUBKEY = "2e2eb3f0749a303004023638fd7216586c68081a53ec569e7b39cf471480a815"
GOLDEN_NUMBER = "ac6f2a23878ddb4e37b9e95b26884597d849467363a1796435b3697457817a73"
GOLDEN_FINGERPRINT = "2ca7950505032552a04db52e5600c22a"

# RFC 8439: section 2.3.2, and appendix A.1 vectors 1 to 5, as (key, counter, nonce, block).
RFC_8439 = [
    (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "block"), RFC_8439)
def test_chacha20_is_rfc_8439(key: str, counter: int, nonce: str, block: str) -> None:
    words = np.frombuffer(bytes.fromhex(nonce), dtype="<u4")
    tail = (counter, *(int(w) for w in words))
    assert keystream(bytes.fromhex(key), tail, 1).tobytes().hex() == block  # type: ignore[arg-type]
    ours = scattered_blocks(bytes.fromhex(key), np.array([tail, tail], dtype=np.uint32))
    assert ours[1].astype("<u4").tobytes().hex() == block


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(0, 2**63))
def test_prf64_is_the_keystream_word(ids: list[int], start: int) -> None:
    key = bytes(range(32))
    scattered = prf64(key, np.array(ids, dtype=np.uint64))
    for j, identity in enumerate(ids):
        block = identity >> 3
        words = keystream(key, (block & 0xFFFFFFFF, block >> 32, 0, 0), 1).view("<u8")
        assert scattered[j] == words[identity & 7]
    run = np.arange(start, start + 50, dtype=np.uint64)
    assert np.array_equal(prf64(key, run), [prf64(key, run[j : j + 1])[0] for j in range(50)])


def test_prf64_golden_values() -> None:
    """A format: bins of existing runs depend on it."""
    ids = np.array([0, 1, 7, 8, 12345, 2**32, 2**35 + 3, 2**63 - 1, 2**63], dtype=np.uint64)
    assert [f"{v:016x}" for v in prf64(bytes(range(32)), ids)] == GOLDEN_PRF


def test_prf64_takes_any_order_shape_and_size() -> None:
    key = bytes(range(32))
    ids = np.arange(200_000)
    straight = prf64(key, ids)
    order = np.random.default_rng(7).permutation(ids)  # seed 7
    assert np.array_equal(prf64(key, order), straight[order])
    assert np.array_equal(prf64(key, ids.reshape(400, 500)), straight.reshape(400, 500))
    assert np.array_equal(prf64(key, ids[::977]), straight[::977])
    crossing = np.arange((1 << 35) - 20, (1 << 35) + 20)
    assert len(set(prf64(key, crossing).tolist())) == 40
    assert prf64(key, np.empty(0, dtype=np.int64)).shape == (0,)


def test_prf64_is_uniform() -> None:
    """64 bits, each set half the time, and 390 bins even: all within bounds with false-alarm rate below 1e-6."""
    values = prf64(SecretKey.from_bytes(SECRET).derive("test"), np.arange(1_000_000))
    for bit in range(64):
        ones = int(((values >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 500_000) < 5.7 * 500  # 64 bits of sd 500
    counts = np.bincount((values % np.uint64(390)).astype(int), minlength=390)
    statistic = float(((counts - 1e6 / 390) ** 2 / (1e6 / 390)).sum())
    assert 254 < statistic < 537  # chi-squared with 389 degrees of freedom, 2.5e-7 on either side


@pytest.mark.parametrize("ids", [np.array([1.5]), np.array([-1]), np.array(["a"])])
def test_prf64_refuses_what_is_no_id(ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"ids have|id is"):
        prf64(bytes(32), ids)


@pytest.mark.parametrize("key", [b"short", bytes(33), "x" * 32])
def test_a_wrong_key_is_refused_without_showing_it(key: object) -> None:
    with pytest.raises(ValueError, match="32 bytes") as caught:
        prf64(key, np.array([1]))  # type: ignore[arg-type]
    assert str(key) not in str(caught.value)


def test_derivation_is_a_format() -> None:
    key = SecretKey.from_bytes(SECRET)
    assert key.derive("run", "abc", "noise").hex() == GOLDEN_SUBKEY
    assert key.derive("bins", 3).hex() == GOLDEN_NUMBER
    assert key.fingerprint() == GOLDEN_FINGERPRINT


PART = st.one_of(st.text(max_size=4), st.integers(-5, 300), st.integers())


@given(st.lists(PART, min_size=1, max_size=4), st.lists(PART, min_size=1, max_size=4))
def test_different_paths_have_different_sub_keys(one: list[str | int], two: list[str | int]) -> None:
    key = SecretKey.from_bytes(SECRET)
    assert (key.derive(*one) == key.derive(*two)) == (one == two)


def test_paths_that_look_alike_differ() -> None:
    key = SecretKey.from_bytes(SECRET)
    paths: list[tuple[str | int, ...]] = [
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        ("1",),
        (1,),
        (1, ""),
        ("", 1),
        (-1,),
        ("a", "bc", ""),
    ]
    assert len({key.derive(*path) for path in paths}) == len(paths)
    assert SecretKey.generate().derive("a") != SecretKey.generate().derive("a")


@pytest.mark.parametrize("path", [(), (True,), (1.0,), (b"a",), (None,)])
def test_bad_paths(path: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError), match="path"):
        SecretKey.from_bytes(SECRET).derive(*path)  # type: ignore[arg-type]


def shown(key: SecretKey) -> str:
    text = f"{key!r} {key} {key:} {[key]} {(key,)!s} {key.__class__.__dict__} {dir(key)}"
    try:
        raise RuntimeError(key)
    except RuntimeError as error:
        text += "".join(traceback.format_exception(error)) + repr(error)
    return text


def test_the_secret_shows_nowhere() -> None:
    key = SecretKey.from_bytes(SECRET)
    text = shown(key)
    for form in (SECRET.hex(), repr(SECRET), repr(bytearray(SECRET)), str(list(SECRET)), SECRET.decode("latin1")):
        assert form not in text
    assert key.derive("a").hex() not in text
    with pytest.raises(TypeError):
        vars(key)


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy, lambda k: pickle.dumps({"a": [k]})])
def test_a_key_cannot_be_pickled_or_copied(attempt: object) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        attempt(SecretKey.from_bytes(SECRET))  # type: ignore[operator]


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "a" * 32, None])
def test_a_key_is_32_bytes(secret: object) -> None:
    with pytest.raises(ValueError, match="32 bytes") as caught:
        SecretKey.from_bytes(secret)  # type: ignore[arg-type]
    assert "aaaa" not in str(caught.value)


def test_a_key_is_not_made_by_its_constructor() -> None:
    with pytest.raises(TypeError, match="generate"):
        SecretKey()


def test_equality() -> None:
    key = SecretKey.from_bytes(SECRET)
    assert key == SecretKey.from_bytes(SECRET)
    assert hash(key) == hash(SecretKey.from_bytes(SECRET))
    assert key != SecretKey.generate()
    assert key != SECRET


def test_save_and_load(tmp_path: Path) -> None:
    key = SecretKey.generate()
    old = os.umask(0)
    try:
        key.save(tmp_path / "run.key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    assert SecretKey.load(tmp_path / "run.key") == key
    assert key.path == tmp_path / "run.key"
    assert os.listdir(tmp_path) == ["run.key"]
    assert key.ledger().path == tmp_path / "run.ledger"


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    first = SecretKey.generate()
    first.save(path)
    with pytest.raises(FileExistsError, match="never overwritten"):
        SecretKey.generate().save(path)
    assert SecretKey.load(path) == first
    assert os.listdir(tmp_path) == ["run.key"]


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    key = SecretKey.generate()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            key.save(tmp_path / "run.key")
    assert os.listdir(tmp_path) == []
    assert key.path is None
    key.save(tmp_path / "run.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o620])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.key"
    SecretKey.from_bytes(SECRET).save(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600") as caught:
        SecretKey.load(path)
    assert SECRET.hex() not in str(caught.value)
    path.chmod(0o600)
    assert SecretKey.load(path) == SecretKey.from_bytes(SECRET)


@fault(
    "Damaged files",
    "A key file is cut off, or something is added to it.",
    says="is not a whole key file of this library",
    loses="The run, unless there is a backup of the key. The error shows nothing of the secret.",
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[:20],
        lambda b: b + b"x",
        lambda b: b"",
        lambda b: b[:-3] + b"zz\n",
        lambda b: b"x" + b[1:],
    ],
)
def test_a_damaged_file_is_refused_without_showing_it(tmp_path: Path, damage: object, sentence: str) -> None:
    path = tmp_path / "run.key"
    SecretKey.from_bytes(SECRET).save(path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(KeyFileError, match=sentence) as caught:
        SecretKey.load(path)
    assert SECRET.hex()[:16] not in "".join(traceback.format_exception(caught.value))


@fault(
    "Damaged files",
    "Any one bit of a key file flips.",
    says="is not a whole key file of this library: it is cut off, damaged or another file",
    loses="The run, unless there is a backup of the key. No other key is used by mistake.",
)
def test_every_flipped_bit_is_noticed(tmp_path: Path, sentence: str) -> None:
    """No flip loads as another key, which would go on with noise that cancels nothing and other bins."""
    path = tmp_path / "run.key"
    SecretKey.from_bytes(SECRET).save(path)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(KeyFileError, match=sentence):
            SecretKey.load(path)


def test_a_traceback_with_local_variables_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    SecretKey.from_bytes(SECRET).save(path)
    path.write_bytes(path.read_bytes()[:-1])  # damaged, but the secret is in it
    with pytest.raises(KeyFileError) as caught:
        SecretKey.load(path)
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "source = " in shown
    assert SECRET.hex()[:16] not in shown
    assert repr(SECRET)[2:10] not in shown


@fault(
    "Killed processes",
    "The process is killed while it saves a key.",
    says="if the process was killed when it saved a new key, remove the file",
    loses="The key. No noise was made with it.",
)
def test_a_key_whose_save_was_cut_off_is_refused_and_not_overwritten(tmp_path: Path, sentence: str) -> None:
    path = tmp_path / "run.key"
    SecretKey.from_bytes(SECRET).save(path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(KeyFileError, match=sentence):
            SecretKey.load(path)
    with pytest.raises(FileExistsError):
        SecretKey.generate().save(path)


WHAT_STAYS_IN_MEMORY = """
import sys
from lambdacgd.keys import SecretKey

MASK = bytes(i ^ 0x5A for i in range(256))  # so that what is looked for stands nowhere in memory by itself
secret = bytes((37 * i + 11) % 256 for i in range(32))
digits = b"".join(bytes((b"0123456789abcdef"[n] ^ 0x5A,)) for byte in secret[4:12] for n in (byte >> 4, byte & 15))
key = SecretKey.from_bytes(secret)
key.save(sys.argv[1])
key = SecretKey.load(sys.argv[1])
key.destroy()
hits = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.readlines():
        span, rights, _, _, inode, *name = line.split()
        if "rw" in rights and not (name and name[0].startswith("[v")):
            begin, end = (int(x, 16) for x in span.split("-"))
            while begin < end:
                memory.seek(begin)
                try:
                    part = memory.read(min(1 << 22, end - begin))
                except OSError:
                    break
                hits += part.translate(MASK).count(digits)
                begin += len(part) or end
print(hits)
"""


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_destroy_leaves_no_copy_in_the_files_form(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WHAT_STAYS_IN_MEMORY, str(tmp_path / "run.key")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


def test_a_folder_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises((KeyFileError, OSError)):
        SecretKey.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no key file"):
        SecretKey.load(tmp_path / "none.key")
    with pytest.raises(FileNotFoundError):
        SecretKey.generate().save(tmp_path / "no" / "folder.key")
    with pytest.raises(KeyFileError, match="save"):
        SecretKey.generate().ledger()


def test_destroy_forgets_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    key = SecretKey.generate()
    key.save(path)
    memory = key._secret
    key.destroy()
    assert not any(memory)
    assert not path.exists()
    for use in (lambda: key.derive("a"), key.fingerprint, lambda: key.save(tmp_path / "again.key"), lambda: hash(key)):
        with pytest.raises(DestroyedKeyError, match="destroyed"):
            use()
    assert repr(key) == "<SecretKey destroyed>"
    key.destroy()
    loaded = SecretKey.from_bytes(SECRET)
    loaded.destroy()  # without a file


def test_destroy_removes_the_file_it_was_loaded_from(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    SecretKey.generate().save(path)
    key = SecretKey.load(path)
    linked = tmp_path / "hard.link"
    os.link(path, linked)
    key.destroy()
    assert not path.exists()
    assert not any(linked.read_bytes())  # the content was overwritten, not only unlinked


def test_destroy_removes_a_read_only_file_and_reports_one_it_cannot_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.key"
    SecretKey.generate().save(path)
    path.chmod(0o400)
    key = SecretKey.load(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(PermissionError):
            key.destroy()
    with pytest.raises(DestroyedKeyError):
        key.fingerprint()
    assert not any(path.read_bytes())
    key.destroy()  # not silently done: the file is still there, and goes now
    assert not path.exists()


def refuse(*arguments: object, **more: object) -> None:
    raise PermissionError("read-only file system")


def test_destroy_leaves_another_key_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "run.key", tmp_path / "other.key"
    key, survivor = SecretKey.generate(), SecretKey.generate()
    key.save(path)
    survivor.save(other)
    os.replace(other, path)
    with pytest.raises(KeyFileError, match="left alone"):
        key.destroy()
    with pytest.raises(DestroyedKeyError):
        key.fingerprint()
    assert SecretKey.load(path) == survivor


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy, lambda k: pickle.dumps({"a": [k]})])
def test_a_sub_key_cannot_be_pickled_or_copied(attempt: object) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        attempt(SecretKey.from_bytes(SECRET).derive("run"))  # type: ignore[operator]


def test_a_sub_key_does_not_show_itself() -> None:
    subkey = SecretKey.from_bytes(SECRET).derive("run", "1", "bins")
    assert isinstance(subkey, bytes)
    assert {repr(subkey), str(subkey), f"{subkey}", f"{subkey!r}"} == {"<sub-key>"}
    with pytest.raises(ValueError, match="integers") as caught:
        prf64(subkey, np.array([0.5]))
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert repr(bytes(subkey)) not in "".join(shown.format())


def _frames(error: BaseException) -> str:
    """What a traceback with local variables shows, without the test's own frame."""
    found = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(traceback.StackSummary.from_list(found.stack[1:]).format())


def test_a_traceback_with_local_variables_shows_no_sub_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while blocks are made."""
    key = SecretKey.generate().derive("bins")
    monkeypatch.setattr(keys, "_cipher", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        prf64(key, np.array([5, 1 << 40]))
    shown = _frames(caught.value)
    assert "<sub-key>" in shown
    assert repr(bytes(key))[2:-1] not in shown


def test_a_traceback_with_local_variables_shows_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = SecretKey.generate()
    key.save(tmp_path / "run.key")
    monkeypatch.setattr(SecretKey, "_hash", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        SecretKey.load(tmp_path / "run.key")
    monkeypatch.undo()
    shown = _frames(caught.value)
    assert "<secret>" in shown
    assert repr(bytes(key._secret))[2:-1] not in shown
    assert str(list(key._secret))[:20] not in shown


def test_a_draft_is_removed_even_if_the_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="input/output error"):
        SecretKey.generate().save(tmp_path / "run.key")
    assert list(tmp_path.iterdir()) == []
