"""Where a server cannot have storage, every process says why."""

import errno
import os
from pathlib import Path

import pytest

from tandem.config import ServerConfig
from tandem.page_files import SystemCalls
from tandem.ranks import Rank
from tandem.server.api.model_facts import page_secret
from tandem.server.processes import ServerFailure
from tandem.server.worker_storage import open_page_files


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
