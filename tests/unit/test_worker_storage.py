"""What is said of storage: in the log, and where a server cannot have it."""

import errno
import os
from pathlib import Path

import pytest

from tandem.config import ServerConfig
from tandem.page_files import SystemCalls
from tandem.ranks import Rank
from tandem.server.api.facts import page_secret
from tandem.server.processes import ServerFailure
from tandem.server.worker_storage import LINE_EVERY_SECONDS, Complaints, open_page_files

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


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_folder_that_cannot_be_used_is_named_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def start() -> None:
        config = ServerConfig("model", hicache_storage_backend="file", hicache_storage_dir=str(tmp_path))
        if is_worker:
            open_page_files(config, {}, "", Rank(), page_bytes=8)
        else:
            page_secret(config)

    with monkeypatch.context() as patch:
        patch.setattr(SystemCalls, "write", full)
        with pytest.raises(ServerFailure, match=f"no storage of pages in {tmp_path}: .*No space left"):
            start()
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o777)
    with pytest.raises(ServerFailure, match=f"no storage of pages in {tmp_path}: others can write"):
        start()
