"""What happens when something breaks: each fault is named at the test that does it, and docs/faults.md lists them all.

``python -m reproduce faults`` writes the page from these names, and a test checks that it is current.
"""

from __future__ import annotations

import pytest


def fault(kind: str, done: str, *, says: str = "", shows: str = "", loses: str) -> pytest.MarkDecorator:
    """Mark a test that breaks something.

    Args:
        kind: The part of the table, such as "Killed processes".
        done: What is done to the run.
        says: A part of the error's sentence. The test must take it from the fixture ``sentence`` and match it.
        shows: What the user sees where there is no error of ours.
        loses: What is lost.
    """
    assert bool(says) != bool(shows), "either an error says something, or something is to be seen"
    return pytest.mark.fault(kind=kind, done=done, says=says, shows=shows, loses=loses)
