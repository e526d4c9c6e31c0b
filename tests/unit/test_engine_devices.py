"""Of several workers each has a device of its own, and what carries tensors between them follows from where those are.

No device is here. A group of one is made whose devices have another name for the CPU, and whose NCCL is gloo.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.config import ServerConfig
from tandem.core.values import Incarnation
from tandem.engine import devices, machine_memory
from tandem.engine.kv_memory import KvShape
from tandem.engine.model_config import ModelError
from tandem.engine.parallel import WorkerGone
from tandem.engine.process_group import INTERFACES, Sent, backends, others_there
from tandem.ranks import all_ranks
from tandem.server.pool_size import pool_pages
from tandem.server.processes import Launch


def launches(**settings: Any) -> list[Launch]:
    config = ServerConfig(model="some", **settings)
    return [
        Launch(config, "/model", Incarnation("s", "1"), 0, 1, 0, dp_rank=dp_rank, rank=rank)
        for dp_rank in range(config.dp_size)
        for rank in all_ranks(*config.cut.sizes)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"tp_size": 4},
        {"tp_size": 2, "pp_size": 2},
        {"attn_cp_size": 2, "dp_size": 2},
        {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("first", "names"), [("cuda", "0123"), ("cuda:3", "3456")])
def test_each_worker_of_a_server_has_the_device_behind_that_of_the_one_before(
    settings: dict[str, Any], first: str, names: str
) -> None:
    own = [devices.own_device(launch.config.device, launch.worker) for launch in launches(device=first, **settings)]

    assert own == [f"cuda:{number}" for number in names]


@pytest.mark.parametrize("device", ["cpu", "abacus", "cuda:first"])
def test_what_has_no_number_is_what_all_workers_have(device: str) -> None:
    assert devices.own_device(device, 3) == device


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda", 3), ("cuda:2", 5)])
@pytest.mark.parametrize("worker", [0, 3])
def test_workers_without_a_device_of_their_own_are_refused_with_both_numbers(
    device: str, count: int, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    with pytest.raises(ModelError) as refusal:
        devices.take(device, worker=worker, workers=4)

    first = devices.own_device(device, 0)
    assert f"4 workers need a device each, from {first} on, and this machine has {count}; lower" in str(refusal.value)


def test_devices_that_are_there_are_taken_each_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "empty", lambda *_size, device: device)

    assert [devices.take("cuda:1", worker=worker, workers=3) for worker in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert taken == ["cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize("device", ["abacus", "cuda:first"])
def test_what_is_no_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ModelError, match=device):
        devices.take(device, workers=2)


def test_tensors_of_devices_are_carried_by_nccl_and_all_others_by_gloo() -> None:
    assert backends("gloo", "cpu") == "cpu:gloo"
    assert backends("gloo", "cuda:1") == "cpu:gloo,cuda:nccl"
    assert backends("gloo_at", "cuda:1") == "cpu:gloo_at,cuda:nccl"
    assert INTERFACES == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_on_devices_do_not_share_the_memory_that_they_have(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = KvShape(1, num_kv_heads=4, head_dim=64)  # pages of 32 KiB
    of_weights: dict[str, Any] = {"dtype": torch.float32, "weight_bytes": 0, "is_packed": False}
    model: Any = SimpleNamespace(kv_shape=shape, device=device, max_context=4096, **of_weights)
    config = ServerConfig(model="some", device=device, tp_size=2, mem_fraction_static=0.5)
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: 200 << 15)
    for left, pages in ((1000, 100), (80, 80)):
        monkeypatch.setattr(machine_memory, "bytes_left", lambda _, weight_bytes, left=left: left << 15)
        assert pool_pages(config, model) == (pages // 2 if device == "cpu" else pages)


def test_who_waits_for_another_worker_decodes_without_graphs() -> None:
    def rows(**settings: Any) -> int:
        return ServerConfig(model="some", device="cuda", **settings).graph_rows

    assert rows() == rows(dp_size=2) > 0
    assert rows(tp_size=2) == rows(pp_size=2) == rows(attn_cp_size=2) == 0
    assert rows(tp_size=2, dp_size=2, enable_dp_attention=True) == 0


def test_a_device_without_memory_left_is_no_worker_that_is_gone() -> None:
    with pytest.raises(WorkerGone, match="NCCL error"), others_there():
        raise torch.distributed.DistBackendError("NCCL error: remote process exited\nwith more")
    with pytest.raises(torch.OutOfMemoryError), others_there():
        raise torch.OutOfMemoryError("CUDA out of memory")


class Work:
    waited = False

    def wait(self) -> None:
        self.waited = True


@pytest.mark.parametrize(("most", "waited"), [(0, [True] * 3), (2, [True, False, False])])
def test_a_device_waits_for_what_was_sent_at_once_and_a_cpu_later(most: int, waited: list[bool]) -> None:
    sent, works = Sent(most), [Work() for _ in range(3)]
    for work in works:
        sent.add(work, torch.empty(0))  # pyright: ignore[reportArgumentType]
    assert [work.waited for work in works] == waited


# --- a group of processes --------------------------------------------------------------------------------------------

PROGRAM = """
import faulthandler, os, socket, sys, traceback
import numpy as np
import torch
from tandem.core.lockstep import Lockstep
from tandem.engine import process_group, row_exchange
from tandem.engine.parallel import Shard
from tandem.ranks import all_ranks

MEETING_S = 60  # nobody stays behind for longer
AT = "cpu:0"  # a device that is not "cpu", and is the CPU
calls = []

def noted(module, name):
    real = getattr(module, name)
    setattr(module, name, lambda *args: calls.append(name) or real(*args))

def shards_of_stages(number, at):
    noted(process_group, "close_doors")
    noted(process_group, "greet")
    noted(process_group.ProcessPipeline, "greet")
    rank = all_ranks(2, 2)[number]
    peers = process_group.ReplicaGroup(rank, at)
    value = float(rank.tp_rank)
    if rank.pp_rank > 0:
        value = float(peers.pipeline.receive_hidden(2, 3, torch.float32)[1, 2])
    total = peers.group.all_reduce(torch.full((2, 3), value + 1))
    if rank.pp_rank == 0:
        peers.pipeline.send_hidden(total)
        assert not peers.pipeline._hidden_sent.works, "the device has waited"
    if rank.samples:
        peers.pipeline.send_tokens(np.array([int(total[0, 0])], dtype=np.int32))
    else:
        assert peers.pipeline.receive_tokens(1).tolist() == [8]  # 1 + 2, then 4 + 4
    return peers

def ranks_that_step_together(number, at):
    noted(row_exchange, "close_doors")
    noted(row_exchange, "greet")
    ranks = row_exchange.RowExchange(Shard(number, 2), Lockstep(2), at)
    assert ranks.meet(number + 1)
    rows = ranks.rows(torch.full((number + 1, 2), float(number)))
    assert rows[:, 0].tolist() == [0, 1, 1]
    assert ranks.sums(rows + 1)[:, 0].tolist() == [2, 4][number : number + 1] * (number + 1)
    return ranks

kind, size = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
process_group.backends = lambda gloo, device: "cpu:" + gloo if device == AT else "no device"
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
children = []
for number in range(size):
    child = os.fork()
    if not child:
        code = 1
        faulthandler.dump_traceback_later(MEETING_S, exit=True)
        try:
            fd = listener.fileno() if number == 0 else listener.close()
            kept = globals()[kind](number, process_group.Meeting("127.0.0.1", port, fd, device=AT))
            assert calls == ["close_doors", "greet", "greet"][: 3 if size == 4 else 2], calls
            process_group.least(0)  # nobody ends, nor lets go of what it has sent, while another one is to hear of it
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0] * size, codes
"""


@pytest.mark.parametrize(("kind", "size"), [("shards_of_stages", 4), ("ranks_that_step_together", 2)])
def test_workers_on_devices_meet_behind_closed_doors_and_say_what_those_on_a_cpu_say(kind: str, size: int) -> None:
    words = [sys.executable, "-c", PROGRAM, kind, str(size)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
