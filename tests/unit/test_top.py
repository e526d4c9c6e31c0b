"""The table of `tandem top`, from what servers say; and how it behaves where no such server is."""

import httpx
import pytest

from tandem.cli import top
from tandem.cli.client import ServerTrouble

LOADS = {
    "loads": [
        {"url": "http://127.0.0.1:1", "role": "prefill", "dp_rank": 0},
        {"url": "http://127.0.0.1:2", "role": "decode", "dp_rank": 0, "num_running_reqs": 3, "token_usage": 0.5},
    ]
}


def metrics(rank: int = 0, **numbers: float) -> str:
    labels = f'dp_rank="{rank}",engine_type="unified"'
    return "".join(f"sglang:{name}{{{labels}}} {number}\n" for name, number in numbers.items())


def client(answers: dict[str, object]) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(str(request.url))
        if found is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=found) if isinstance(found, dict) else httpx.Response(200, text=str(found))

    return httpx.Client(base_url="http://router", transport=httpx.MockTransport(answer))


def looked(at: float, **numbers: float) -> top.Look:
    return top.Look("http://a:1", "decode", "0", at, numbers)


def test_rates_are_what_counters_did_between_two_looks() -> None:
    before = looked(10.0, generation_tokens_total=100, time_to_first_token_seconds_count=1)
    before.values["time_to_first_token_seconds_sum"] = 5.0
    now = looked(12.0, generation_tokens_total=300, time_to_first_token_seconds_count=3, num_running_reqs=2)
    now.values |= {"time_to_first_token_seconds_sum": 5.5, "token_usage": 0.25, "num_bootstrap_failed_reqs_total": 1}
    (row,) = top.rows_between([before], [now])
    assert (row.output_tokens_per_s, row.ttft_s, row.running, row.failed) == (100.0, 0.25, 2, 1)
    assert (row.prompt_tokens_per_s, row.queued) == (None, None), "not said, so not 0"
    head, line = top.table([row])
    assert dict(zip(head.split(), line.split(), strict=True)) == {
        **dict.fromkeys(("queue", "boot", "xfer", "in_tok/s", "hits"), "-"),
        "server": "a:1",
        "role": "decode",
        "rank": "0",
        "run": "2",
        "out_tok/s": "100",
        "kv": "25%",
        "ttft": "250ms",
        "failed": "1",
    }


def test_a_server_that_was_started_anew_has_no_rate_below_nothing() -> None:
    rows = top.rows_between([looked(1.0, generation_tokens_total=500)], [looked(2.0, generation_tokens_total=3)])
    assert rows[0].output_tokens_per_s is None


def test_one_row_for_each_rank_with_its_workers_added_up() -> None:
    text = metrics(0, num_running_reqs=1) + metrics(1, num_running_reqs=2, worker_open_transfers=3)
    text += 'tandem:worker_open_transfers{dp_rank="1",tp_rank="1"} 4\n'
    found = top.ranks_of(text, "http://a:1", "")
    assert [(look.rank, look.role, look.values["num_running_reqs"]) for look in found] == [
        ("0", "unified", 1),
        ("1", "unified", 2),
    ]
    assert found[1].values["worker_open_transfers"] == 7


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    text = 'tandem:prompt_tokens_total{engine_type="unified"} 5\n'
    text += "".join(metrics(rank, num_running_reqs=1) for rank in range(11, -1, -1))
    found = top.ranks_of(text, "http://a:1", "")
    assert [look.rank for look in found] == [top.SERVER, *map(str, range(12))]


def test_what_a_server_counts_for_all_ranks_is_no_ranks() -> None:
    """Of its only rank where it has one, and of none where it has several: there it has a row of its own."""
    served = 'sglang:prompt_tokens_total{engine_type="unified"} 5\n'
    (only,) = top.ranks_of(served + metrics(0, num_running_reqs=1), "http://a:1", "")
    assert (only.rank, only.values) == ("0", {"prompt_tokens_total": 5, "num_running_reqs": 1})
    text = served + metrics(0, num_running_reqs=1) + metrics(1, num_running_reqs=2)
    found = top.ranks_of(text, "http://a:1", "")
    assert [(look.rank, look.values) for look in found] == [
        ("all", {"prompt_tokens_total": 5}),
        ("0", {"num_running_reqs": 1}),
        ("1", {"num_running_reqs": 2}),
    ]


def test_behind_a_router_who_cannot_be_reached_keeps_the_row_that_the_router_has() -> None:
    with client({"http://router/v1/loads": LOADS, "http://127.0.0.1:1/metrics": metrics(num_running_reqs=1)}) as asks:
        rows = top.rows_between([], top.look(asks, "http://router"))
    assert [(row.server, row.role, row.running) for row in rows] == [
        ("http://127.0.0.1:1", "prefill", 1),
        ("http://127.0.0.1:2", "decode", 3),
    ]
    assert "127.0.0.1:2: no server answers" in "\n".join(top.table(rows))


@pytest.mark.parametrize(
    "loads",
    [
        *({}, {"loads": 3}, {"loads": [3]}, "text", "[" * 100_000, {"loads": [{"url": "http://127.0.0.1:9"}, 4]}),
        *({"loads": [{"url": 5}]}, {"loads": [{"url": "http://127.0.0.1:2", "num_running_reqs": 10**400}]}),
    ],
)
def test_who_answers_otherwise_is_named_in_one_line(loads: object) -> None:
    answers = {"http://router/v1/loads": loads, "http://router/5/metrics": "# nothing"}
    with client(answers) as asks, pytest.raises(ServerTrouble, match="http://router answers"):
        top.look(asks, "http://router")


def test_a_worker_whose_address_is_none_keeps_the_row_that_the_router_has() -> None:
    with client({"http://router/v1/loads": {"loads": [{"url": "http://[::1", "role": "prefill"}]}}) as asks:
        (row,) = top.rows_between([], top.look(asks, "http://router"))
    assert (row.role, "InvalidURL" in row.trouble) == ("prefill", True)


def test_what_a_server_calls_itself_is_not_obeyed_by_the_terminal() -> None:
    row = top.RankRow("http://a\x1b]0;owned\x07b", "de\x1b[2Jcode", "0", trouble="x\x9b1m")
    shown = "\n".join(top.table([row]))
    assert "\x1b" not in shown
    assert "\x9b" not in shown
