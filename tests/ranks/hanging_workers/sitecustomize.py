"""Has a worker of a server keep a batch to itself, while it answers as ever: what a collective that waits for ever is.

A process that is stopped answers nothing at all. Python imports a module of this name when it starts, where this folder
is in PYTHONPATH. A worker whose process id stands in the file `TANDEM_TEST_HANGING_WORKERS` returns no batch.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any  # messages of a channel

FILE = "TANDEM_TEST_HANGING_WORKERS"


def hang_when_told() -> None:
    from tandem.core.events import BatchReturned
    from tandem.server.channel import BlockingChannel

    send = BlockingChannel.send

    def hang(self: BlockingChannel[Any], message: Any) -> None:
        while isinstance(message, BatchReturned) and str(os.getpid()) in Path(os.environ[FILE]).read_text().split():
            time.sleep(0.1)
        send(self, message)

    BlockingChannel.send = hang  # type: ignore[method-assign]  # of this process alone: it is what the test is about


if FILE in os.environ and "tandem.server.worker_process" in sys.orig_argv:
    hang_when_told()
