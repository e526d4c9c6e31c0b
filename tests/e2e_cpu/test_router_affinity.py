"""Real processes: the turns of a conversation land where its beginning is cached."""

from itertools import pairwise
from typing import Any

import pytest
from cluster import Server, cluster

PAGE = 16
TURNS = 4
NAMES = ("Ada", "Grace", "Alan")  # an odd number: taking turns would send every second turn to the other prefill


def opening(name: str) -> list[dict[str, str]]:
    story = f"{name} keeps a shop. " + " ".join(
        f"{name} has {number} apples and buys {number} more." for number in range(9)
    )
    return [{"role": "user", "content": f"{story} How many?"}]


def turn(router: Server, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Says the conversation so far, and goes on in it with what was answered. Returns what was used."""
    reply = router.call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0})
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then 2 more?"}]
    return reply["usage"]


def conversations(router: Server) -> dict[str, list[dict[str, Any]]]:
    """The usage of every turn; whoever talks takes turns."""
    said = {name: opening(name) for name in NAMES}
    used: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for _ in range(TURNS):
        for name in NAMES:
            used[name].append(turn(router, said[name]))
    return used


@pytest.mark.slow
def test_every_turn_of_a_conversation_finds_the_turn_before_in_the_cache() -> None:
    flags = {"router_flags": ("--prefill-policy", "cache_aware"), "decode_flags": ("--disable-radix-cache",)}
    with cluster(prefills=2, decodes=1, **flags) as made:  # what is cached, prefill has cached
        assert made.router is not None
        for used in conversations(made.router).values():
            for before, after in pairwise(used):
                cached = after["prompt_tokens_details"]["cached_tokens"]
                assert cached >= before["prompt_tokens"] // PAGE * PAGE - PAGE
