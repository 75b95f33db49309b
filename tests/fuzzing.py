"""Files as an enemy or a bad disk would leave them: bytes, JSON and changed copies of good files, for hypothesis.

``LAMBDACGD_FUZZ`` is how many files each test tries (a few dozen by default; thousands, overnight).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("LAMBDACGD_FUZZ", "40"))

#: Files that have brought down readers of JSON: depth, digits, constants, keys, encodings.
NASTY = (
    b"", b"\0", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"null", b"[]", b"{}", b'""', b"NaN", b"[Infinity]", b"1e999",
    b"9" * 5000, b"[" * 200_000, b'{"a":' * 200_000, b'{"a":1,"a":2}', b'{"format":["\\ud800"]}',
    b"\x80\x04cos\nsystem\n",
    b'{"format":' + b"9" * 4000 + b"}", b" " * 100_000, b"[" * 900 + b"]" * 900,
)  # fmt: skip

#: What a leaf of a good file may turn into.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308, float("inf"),
    float("-inf"), float("nan"), "", "nan", "-inf", "1e999", "\ud800", "\0", "x" * 10_000, "../../etc/passwd", "auto",
    [], {}, [[]], [None], {"": None}, {"name": []}, {"$": "tensor", "name": "x"}, {"$": "numpy", "dtype": "object"},
    {"$": "dict", "items": [[[], 1]]}, {"$": []}, {"$": "bytes", "base64": 7}, {"$": "integer", "hex": "9" * 9999},
)  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def files(good: bytes, *, sealed: Callable[[Any], Any] = lambda value: value) -> st.SearchStrategy[bytes]:
    """Bytes that may stand where ``good`` stood.

    Args:
        good: A file that is read well.
        sealed: Puts right the digest of a JSON file that was changed: a fuzzer that is stopped by it finds nothing.
    """
    made = [
        st.sampled_from(NASTY),
        st.binary(max_size=400),
        json_values.map(lambda value: json.dumps(value).encode()),
        st.randoms(use_true_random=False).map(lambda draw: damaged(good, draw)),
    ]
    try:
        value = json.loads(good)
    except ValueError:
        return st.one_of(made)
    edits = st.randoms(use_true_random=False)
    made.append(edits.map(lambda draw: json.dumps(sealed(edited(copy.deepcopy(value), draw))).encode()))
    made.append(edits.map(lambda draw: json.dumps(edited(copy.deepcopy(value), draw)).encode()))
    return st.one_of(made)


def damaged(good: bytes, draw: Random) -> bytes:
    """As a disk or a copy leaves a file: bits flipped, cut off, a stretch missing, repeated or overwritten."""
    content = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(content) + 1)
        length = draw.choice((1, 4, 64))
        match draw.randrange(5):
            case 0:
                for place in range(at, min(at + 1, len(content))):
                    content[place] ^= 1 << draw.randrange(8)
            case 1:
                del content[at:]
            case 2:
                del content[at : at + length]
            case 3:
                content[at:at] = content[at : at + length]
            case _:
                content[at : at + length] = draw.randbytes(length)
    return bytes(content)


def edited(value: Any, draw: Random) -> Any:
    """As a person or a program edits JSON: one to three entries replaced, removed or added."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return draw.choice(ODD)
        holder, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("", "x", "name", "format", "\ud800"))] = draw.choice(ODD)
            case 2 if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
                try:
                    holder[key] = holder[key] * draw.choice((-1, 0, 2, 0.5, 10**30))
                except OverflowError:
                    holder[key] = -1
            case _:
                holder[key] = draw.choice(ODD)
    return value


def _places(value: Any) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield value, key
            yield from _places(item)
    elif isinstance(value, list):
        for key, item in enumerate(value):
            yield value, key
            yield from _places(item)
