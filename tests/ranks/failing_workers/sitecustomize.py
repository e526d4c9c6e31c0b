"""Has workers of servers report a failure before READY, which none of ours has a reason to.

A worker that pulls, or is pulled from, has nothing to do before READY, so nothing of it can fail. Where each rank makes
its own end of a transfer it does so when the request comes, and then a data plane that is gone, memory that is short
and connections that are refused show there: what sglang#27028 is about. The node has to do right by that, too.

Python imports a module of this name when it starts, where this folder is in PYTHONPATH. The workers whose shards stand
in the file `TANDEM_TEST_FAILING_SHARDS` report each prompt of a batch as failed, when they hear of the batch.
"""

import os
import sys
from pathlib import Path
from typing import Any  # messages of a channel

FILE = "TANDEM_TEST_FAILING_SHARDS"
REASON = "the data plane is gone"


def fail_before_ready() -> None:
    from tandem.core.commands import LaunchBatch
    from tandem.core.events import TransferFailed
    from tandem.core.values import Cause
    from tandem.server.channel import BlockingChannel
    from tandem.transfer.sock import SockTransfer

    made: list[SockTransfer] = []
    make, receive = SockTransfer.__init__, BlockingChannel.receive

    def remember(self: SockTransfer, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    def report(self: BlockingChannel[Any]) -> list[Any]:
        messages = receive(self)
        shards = [transfer._kv.shard for transfer in made if str(transfer._kv.shard) in failing()]
        for message in messages:
            if isinstance(message, LaunchBatch):
                for row in message.plan.rows:
                    for shard in shards:  # 0: the attempt that there is before READY
                        self.send(TransferFailed(row.request, 0, shard, Cause.TRANSFER_FAILED, REASON))
        return messages

    SockTransfer.__init__, BlockingChannel.receive = remember, report  # type: ignore[method-assign]


def failing() -> list[str]:
    return Path(os.environ[FILE]).read_text().split()


if FILE in os.environ and "tandem.server.worker_process" in sys.orig_argv:
    fail_before_ready()
