"""What a worker says of its storage in the log."""

import pytest

from tandem.server.worker_storage import LINE_EVERY_SECONDS, Complaints

FULL = "storage: OSError: No space left on device"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_what_a_full_disk_answers_to_every_request_is_a_line_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    complaints = Complaints(lambda: now)
    for _ in range(1000):
        complaints.note(FULL)
    assert lines(caplog) == [FULL]
    now = LINE_EVERY_SECONDS
    complaints.note(FULL)
    complaints.note(FULL)
    assert lines(caplog) == [f"{FULL} (and 999 times since this was last said)"]
    now *= 2
    complaints.note(FULL)
    assert lines(caplog) == [f"{FULL} (and 1 times since this was last said)"]


def test_a_line_of_one_kind_hides_none_of_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(lambda: 0.0)
    other = "storage: page 7 of host memory: it has another hash"
    for text in (FULL, other, other.replace("7", "12"), FULL):
        complaints.note(text)
    assert lines(caplog) == [FULL, other]
