"""Workers that have a device each: they say what one engine says, alone and in pairs.

Not on fewer devices than workers: NCCL connects devices.
"""

import os
import signal

import pytest
import torch
from cluster import cluster, eventually, workers_of
from reference import CHUNK, ask_each, assert_same_tokens, real_prompts

NUM_PROMPTS = 24
FLAGS = ("--device", "cuda", "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384")
CUTS = {
    "tp2": ("--tp-size", "2"),
    "pp2": ("--pp-size", "2"),
    "cp2": ("--attn-cp-size", "2"),
    "dp2": ("--dp-size", "2"),
    "dp-attention": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA devices")


@needs_two
@pytest.mark.parametrize("cut", CUTS)
def test_two_workers_on_two_devices_say_what_transformers_says(cut: str) -> None:
    prompts = real_prompts(NUM_PROMPTS)
    with cluster(unified=True, flags=[*FLAGS, *CUTS[cut]]) as it:
        assert it.unified is not None
        assert_same_tokens(prompts, ask_each(it.unified, prompts), path="unified")


@needs_two
@pytest.mark.parametrize(("prefill", "decode"), [("tp2", "tp2"), ("pp2", "pp2"), ("tp2", "pp2"), ("cp2", "tp2")])
def test_a_pair_of_two_workers_each_says_what_transformers_says(prefill: str, decode: str) -> None:
    """The halves share the two devices."""
    prompts = real_prompts(NUM_PROMPTS)
    flags = {"prefill_flags": CUTS[prefill], "decode_flags": CUTS[decode]}
    with cluster(prefills=1, decodes=1, flags=FLAGS, **flags) as it:
        assert it.router is not None
        assert_same_tokens(prompts, ask_each(it.router, prompts), path="remote")


@needs_two
def test_a_worker_that_is_killed_ends_the_server_while_the_other_one_waits_in_nccl() -> None:
    with cluster(unified=True, flags=[*FLAGS, *CUTS["tp2"]]) as it:
        server = it.unified
        assert server is not None
        stream = server.stream("Tom has 3 apples.", max_new_tokens=4000, sampling_params={"ignore_eos": True})
        assert stream.next() is not None
        os.kill(workers_of(server)[1], signal.SIGKILL)
        assert stream.rest()[-1]["error"]["code"] == "worker_lost"
        eventually(lambda: server.member.process.poll() == 1)
        assert "the worker TP1 PP0 process was killed" in server.log
