"""docs/faults.md says what the tests do."""

from __future__ import annotations

from reproduce import faults


def test_the_page_is_current():
    found = faults.faults()
    assert faults.PAGE.read_text(encoding="utf-8") == faults.page(found), "run: python -m reproduce faults"
    assert {fault.kind for fault in found} == set(faults.KINDS)


def test_every_sentence_on_it_is_one_that_its_test_has_seen():
    unseen = [fault.test for fault in faults.faults() if fault.says and not fault.checked]
    assert unseen == []
