"""A model some of whose layers have a window, through servers: they give back what nobody sees, and say the same.

The model is a small random Gemma 3 with the tokenizer of the bundled one; the reference is transformers.
"""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from cluster import Server, cluster, eventually
from reference import PAGE
from served_models import POOL, SIZES, ask, assert_same, prompts_of, served, storage_flags
from tiny_models import make_gemma3
from transformers import PreTrainedModel

WINDOW = 24
CELL = 2 * PAGE * 64 * 4  # bytes of one page, head and layer: several pages of the system
HEADS, WINDOWED, LAYERS = 2, 2, 3
TOKENS = 2048
FEW = ("--max-total-tokens", str(TOKENS), "--swa-full-tokens-ratio", "0.25")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("gemma")
    return where, served(where, make_gemma3(where, head_dim=64, query_pre_attn_scalar=64, **SIZES))


def kv_bytes(server: Server) -> int:
    """Memory that the KV pool has taken."""
    found: dict[int, int] = {}
    for process in psutil.Process(server.member.process.pid).children(recursive=True):
        folder = f"/proc/{process.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if "memfd:tandem-kv" in os.readlink(f"{folder}/{name}"):
                    status = os.stat(f"{folder}/{name}")
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


@pytest.mark.parametrize(
    ("is_off", "cut"),
    [
        (False, ()),
        pytest.param(True, (), marks=pytest.mark.slow),
        pytest.param(False, ("--tp-size", "2"), marks=pytest.mark.slow),
    ],
)
def test_the_pool_has_memory_for_the_windows_only_and_every_token_is_the_same(
    gemma: tuple[Path, PreTrainedModel], is_off: bool, cut: tuple[str, ...]
) -> None:
    where, model = gemma
    flags = [*POOL, *cut, *(["--disable-hybrid-swa-memory", *FEW[:2]] if is_off else FEW)]
    prompts = prompts_of(16, salt=1)
    with cluster(unified=True, model=str(where), flags=flags) as running:
        assert running.unified is not None
        assert_same(model, prompts, ask(running.unified, prompts))
        again = ask(running.unified, prompts[-4:])
        assert_same(model, prompts[-4:], again)
        assert sum(one["meta_info"]["cached_tokens"] for one in again) > 2 * PAGE
        eventually(running.unified.is_idle, what=running.unified.states)
        num_pages, taken = TOKENS // PAGE, kv_bytes(running.unified)
    most = num_pages * HEADS * CELL * (LAYERS - WINDOWED) + num_pages // 4 * HEADS * CELL * WINDOWED
    assert (taken > most) is is_off


def test_a_pair_says_what_transformers_says(gemma: tuple[Path, PreTrainedModel]) -> None:
    where, model = gemma
    flags = [*POOL, *FEW, "--context-length", "256"]
    with cluster(prefills=1, decodes=1, model=str(where), flags=flags) as running:
        assert running.router is not None
        prompts = prompts_of(12, salt=2)
        first = ask(running.router, prompts)
        again = ask(running.router, [*prompts[-2:], prompts[0][: 2 * PAGE + 5], prompts[-1][: 3 * PAGE + 5]])
        assert_same(model, prompts, first)
        assert_same(model, [*prompts[-2:], prompts[0][: 2 * PAGE + 5], prompts[-1][: 3 * PAGE + 5]], again)
        assert {answer["meta_info"]["path"] for answer in first} == {"remote"}
        for server in running.servers:
            eventually(server.is_idle, what=server.states)


@pytest.mark.slow
def test_what_comes_back_from_host_memory_and_storage_says_the_same(
    gemma: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """The pool has a quarter of the pages that are asked about, and parts for fewer."""
    where, model = gemma
    small = ["--max-total-tokens", "480", "--swa-full-tokens-ratio", "0.5", "--hicache-ratio", "8"]
    flags = [*POOL, "--chunked-prefill-size", "48", *small, *storage_flags(tmp_path)]
    prompts = prompts_of(24, salt=3)
    for turn in range(2):
        with cluster(unified=True, model=str(where), flags=flags) as running:
            server = running.unified
            assert server is not None
            for tier in ("storage", "host") if turn else ("host",):
                first, again = ask(server, prompts), ask(server, prompts)
                assert_same(model, prompts, first)
                assert_same(model, prompts, again)
                found = [one["meta_info"]["cached_tokens_details"][tier] for one in (*first, *again)]
                assert sum(found) > 4 * PAGE
            eventually(lambda server=server: not server.state()["copies"] and not server.state()["storage"])
            os.kill(server.member.process.pid, signal.SIGKILL)
