"""Flags: typed, documented, refused when they contradict each other, never accepted and ignored."""

import argparse
import re
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from flags_page import PAGE, flags_page
from tandem.cli import main as cli
from tandem.cli.failure import CommandFailed
from tandem.cli.flags import add_flags, collected, config_of, kind_of, values_of
from tandem.config import ServerConfig, flags, violations
from tandem.core.disagg.dp_rank import DpTopology
from tandem.core.kv_parts import KvGrid
from tandem.core.settings import (
    AllocationPolicy,
    DelayerSettings,
    DpConflictPolicy,
    LoadBalanceMethod,
    LoadFailurePolicy,
    LocalPrefill,
    NodeSettings,
    OptimisticPolicy,
    PrefillInfo,
    PrefillStall,
    PrioritySettings,
    Role,
    SchedulePolicy,
)
from tandem.core.values import MILLISECOND, SECOND, Incarnation, Nanos
from tandem.environment import ENVIRONMENT, Variable
from tandem.flag_roles import NEEDS, ROLES, without_effect
from tandem.metrics.delayer_waits import DelayerWaits
from tandem.server.node.peers import Heartbeat
from tandem.server.node.process import delayer_waits
from tandem.server.node.settings import delayer_settings, heartbeat, node_settings, optimistic_policy
from tandem.server.node.workers import Engines
from tandem.server.processes import Launch
from tandem.server.wire import DataEndpoint

DOCS = Path(__file__).parents[2] / "docs"


PREFILL = ("--disaggregation-mode", "prefill")
NO_DECODE_CACHE = ("--no-disaggregation-decode-enable-radix-cache",)
PAGES = ("--allowed-origins", "https://a.example")
DELAYER = ("--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0.1")
STORAGE = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-dir", "pages")
PRIORITIES = ("--enable-priority-scheduling",)
LOW_FIRST = ("--schedule-low-priority-values-first",)
TIMEOUTS = ("request", "stall", "watchdog", "drain", "dist")


@cache
def parser() -> cli.Parser:
    """Making it takes longer than all that it parses here."""
    made = cli.Parser(prog="tandem serve", allow_abbrev=False)
    made.add_argument("model")
    add_flags(made)
    return made


def parse(*words: str) -> ServerConfig:
    return config_of(parser().parse(["some/model", *words]))


def plain(*words: str) -> ServerConfig:
    """The words as they are, whatever rules they break."""
    return ServerConfig("some/model", **values_of(parser().parse(["some/model", *words]), ServerConfig))


def settings(config: ServerConfig) -> NodeSettings:
    launch = Launch(config, "/model", Incarnation("server", "1"), 0, 1, 0, began_ns=5)
    shards = (DataEndpoint("", 0),) * config.cut.num_shards
    return node_settings(launch, Engines(100, 4096, KvGrid(), "digest", {}, 512, shards))


def test_without_flags_the_configuration_is_the_default() -> None:
    assert parse() == ServerConfig(model="some/model")


@pytest.mark.parametrize("words", [("a", "b"), ("a,b",), ("a", "--served-model-name", "b")])
def test_names_of_a_model_may_stand_behind_each_other(words: tuple[str, ...]) -> None:
    assert parse("--served-model-name", *words, "--port", "1").model_names == ("a", "b")
    assert parse().model_names == ("some/model",)


@pytest.mark.parametrize(("name", "field"), flags())
def test_every_flag_reaches_its_field_with_its_type(name: str, field: argparse.Namespace) -> None:
    kind = kind_of(field.name)
    if kind is bool:
        words, expected = [f"--no-{name[2:]}" if field.default else name], not field.default
    elif field.metadata["choices"]:
        words, expected = [name, field.metadata["choices"][-1]], field.metadata["choices"][-1]
    elif kind is tuple and collected(field)["type"] is float:
        words, expected = [name, "1", "2.5", name, "4"], (1.0, 2.5, 4.0)
    elif kind is tuple:
        words, expected = [name, "a,b", name, "c"], ("a", "b", "c")
    else:
        words, expected = [name, "64"], kind("64")
    parser = cli.Parser(prog="tandem serve")
    parser.add_argument("model")
    add_flags(parser)
    value = getattr(parser.parse(["m", *words]), field.name)
    assert value == expected
    assert type(value) is kind


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--prot", "3"], "unknown argument --prot; did you mean --port?"),
        (["--deterministc"], "unknown argument --deterministc; did you mean --deterministic?"),
        (["--page-sise=16"], "unknown argument --page-sise; did you mean --page-size?"),
        (["--completely-unlike-anything"], "unknown argument --completely-unlike-anything; see"),
        (["stray"], "unknown argument stray; see"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--mem-fraction-static", "x"], "argument --mem-fraction-static: invalid float value: 'x'"),
        (["--max-queued-requests", "9" * 19], "argument --max-queued-requests: invalid int value: '9999999"),
        (["--request-timeout", "nan"], "argument --request-timeout: invalid float value: 'nan'"),
        (["--stall-timeout", "inf"], "argument --stall-timeout: invalid float value: 'inf'"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--attention-backend", "fastest"], "argument --attention-backend: invalid choice: 'fastest'"),
        *(
            (["--schedule-policy", policy], f"argument --schedule-policy: invalid choice: '{policy}'")
            for policy in ("random", "dfs-weight", "hrrn", "routing-key")
        ),
        (["--port"], "argument --port: expected one argument"),
        (["--prefill-delayer-wait-seconds-buckets"], "argument --prefill-delayer-wait-seconds-buckets: expected"),
        (
            ["--prefill-delayer-queue-min-ratio", "automatic"],
            "argument --prefill-delayer-queue-min-ratio: 'automatic' is neither a number nor auto",
        ),
        (["--prefill-delayer-queue-min-ratio", "nan"], "argument --prefill-delayer-queue-min-ratio: 'nan' is neither"),
        (["--prefill-delayer-forward-passes-buckets", "5", "x"], "argument --prefill-delayer-forward-passes-buckets:"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem: error: {line}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--page-size", "12"], "power of two"),
        (["--port", "65536"], "take 0 to 65535"),
        (["--disaggregation-bootstrap-port", "-1"], "take 0 to 65535"),
        (["--cpu-threads", "-1"], "--cpu-threads takes 0 to 1024"),
        (["--cpu-threads", "100000"], "--cpu-threads takes 0 to 1024"),
        (["--max-total-tokens", "0"], "--max-total-tokens must be at least 1"),
        (["--num-reserved-decode-tokens", "-1"], "must not be negative"),
        (["--schedule-conservativeness", "-0.1"], "must not be negative"),
        (["--schedule-policy", "lpm", "--disable-radix-cache"], "lpm goes by the prefix cache, which is off"),
        (["--schedule-policy", "lpm", "--disaggregation-mode", "decode", *NO_DECODE_CACHE], "lpm goes by the prefix"),
        (["--schedule-policy", "lof", "--is-embedding"], "generates no token"),
        (["--schedule-low-priority-values-first"], "needs --enable-priority-scheduling"),
        (["--priority-scheduling-preemption-threshold", "3"], "needs --enable-priority-scheduling"),
        ([*PRIORITIES, "--priority-scheduling-preemption-threshold", "-1"], "must not be negative"),
        ([*PRIORITIES, *PREFILL, "--priority-scheduling-preemption-threshold", "3"], "for unified and decode"),
        (["--drain-timeout", "-1"], "must not be negative"),
        *(([*PAGES, "--allowed-methods", text], "methods in capital letters") for text in ("get", "G T", "", "GET,€")),
        *(([*PAGES, "--allowed-headers", text], "names of headers") for text in ("X-€", "x: y", "", "a\nb")),
        (["--max-prefill-stall-ms", "9000000000000000000"], "--max-prefill-stall-ms and .* are at most 604800000"),
        ([*DELAYER, "--prefill-delayer-max-delay-ms", "1e300"], "--prefill-delayer-max-delay-ms are at most 604800000"),
        (["--enable-hierarchical-cache", "--hicache-size", "1e300"], "--hicache-size and .* are at most 1000000000 GB"),
        ([*STORAGE, "--hicache-storage-size", "1e300"], "--hicache-storage-size are at most 1000000000 GB"),
        *(
            (["--disaggregation-mode", "decode", "--disaggregation-local-prefill", digits], "takes off, auto or")
            for digits in ("9" * 20, "9" * 5000)
        ),
        (["--flight-record-max-bytes", "0"], "--flight-record-max-bytes must be at least 1"),
        (["--chunked-prefill-size", "8"], "at least one page"),
        (["--max-running-requests", "0"], "--max-running-requests"),
        (["--max-running-requests", "65537"], "at most 65536"),
        (["--disaggregation-metadata-slots", "131073"], "at most 131072"),
        (["--mem-fraction-static", "1.5"], "between 0 and 1"),
        (["--request-timeout", "0"], "timeouts must be positive"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--served-model-name", "a", ""], "--served-model-name must not be empty"),
        *(([f"--{name}-timeout", "604801"], "timeouts are at most 604800 seconds") for name in TIMEOUTS),
        (["--optimistic-prefill-policy", "park", "--optimistic-prefill-retries", "2"], "contradict each other"),
        (["--optimistic-prefill-policy", "retry", "--optimistic-prefill-retries", "0"], "contradict each other"),
        (["--optimistic-prefill-policy", "park", "--optimistic-prefill-attempts", "0"], "contradict each other"),
        (["--optimistic-prefill-policy", "retry", "--optimistic-prefill-attempts", "1"], "contradict each other"),
        (["--optimistic-prefill-retries", "2", "--optimistic-prefill-attempts", "2"], "contradict each other"),
        (["--optimistic-prefill-retries", "0", "--optimistic-prefill-attempts", "2"], "contradict each other"),
        (["--optimistic-prefill-attempts", "-1"], "must not be negative"),
        (["--disaggregation-metadata-slots", "0"], "must be at least 1"),
        (["--disaggregation-park-max-tokens", "-1"], "nothing is parked"),
        (["--device", "cuda", "--tp", "2", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:1"], "needs --device cpu"),
        *(
            (["--device", "cuda", *words, "--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs does nothing where several")
            for words in (["--tp", "2"], ["--pp", "2"], ["--tp", "2", "--dp", "2", "--enable-dp-attention"])
        ),
        (["--disaggregation-allow", "10.0.0.0/8", "--disaggregation-mode", "null"], "for prefill and decode"),
        (["--disaggregation-allow", "10.0.0.1/8", "--disaggregation-mode", "decode"], "takes networks"),
        (["--disaggregation-allow", "prefill.local", "--disaggregation-mode", "decode"], "takes networks"),
        (["--disaggregation-local-prefill", "auto"], "for decode servers"),
        (["--disaggregation-decode-allocation-policy", "prefill_complete"], "for decode servers"),
        ([*PREFILL, "--disaggregation-decode-allocation-policy", "prefill_complete"], "for decode servers"),
        (["--disaggregation-local-prefill", "0", "--disaggregation-mode", "decode"], "a positive number"),
        (["--disaggregation-local-prefill", "some", "--disaggregation-mode", "decode"], "a positive number"),
        (["--disaggregation-local-prefill", "9", "--disaggregation-mode", "decode", "--strict-remote"], "forbids"),
        (
            ["--disaggregation-mode", "decode", "--kv-load-failure-policy", "recompute", "--strict-remote"],
            "recompute computes prompts on decode",
        ),
        (["--disaggregation-dp-rank-conflict", "fail", "--disaggregation-mode", "decode"], "for prefill servers"),
        (["--disaggregation-dp-rank-conflict", "fail", "--disaggregation-mode", "prefill"], "needs several DP ranks"),
        (["--disaggregation-park-max-tokens", "9", *PREFILL, "--optimistic-prefill-retries", "2"], "nothing else is"),
        (["--enable-prefill-delayer", "--prefill-delayer-max-delay-passes", "1"], "1 holds nothing back"),
        (["--mem-fraction-static", "0.2", "--max-total-tokens", "64"], "beside --max-total-tokens"),
        (["--num-reserved-decode-tokens", "9", "--schedule-conservativeness", "0"], "which reserves nothing"),
        (["--allowed-host", "a", "--api-key", "secret"], "beside an API key"),
        (["--allowed-origins", "example.org"], "origins like"),
        (["--allowed-origins", "https://example.org/chat"], "origins like"),
        (["--allowed-origins", '["*"]', "--allow-credentials"], "every user's cookies"),
        (["--allow-credentials"], "name one"),
        (["--allowed-methods", "GET"], "name one"),
        (["--allowed-headers", '["x-a"]'], "name one"),
        (["--flight-record-max-bytes", "9"], "nothing is recorded"),
        (["--no-disaggregation-decode-enable-radix-cache"], "for decode servers"),
        (
            [
                *("--disaggregation-decode-enable-radix-cache", "--disable-radix-cache"),
                *("--disaggregation-mode", "decode"),
            ],
            "contradicts --disable-radix-cache",
        ),
        (["--strict-remote"], "for decode servers"),
        (["--prefill-delayer-queue-min-ratio", "0.2"], "need --enable-prefill-delayer"),
        (["--prefill-delayer-max-delay-passes", "9"], "need --enable-prefill-delayer"),
        (["--enable-prefill-delayer", "--disaggregation-mode", "decode"], "computed by prefill servers"),
        (["--enable-prefill-delayer", *PREFILL], "nobody decodes whom a prompt could stall"),
        (["--enable-prefill-delayer", "--prefill-delayer-max-delay-ms", "900"], "for the queue gate"),
        (["--enable-dp-attention"], "needs a --dp-size of 2 or more"),
        (["--enable-dp-attention", "--dp-size", "2"], "and the same --tp-size"),
        (["--enable-dp-attention", "--dp-size", "2", "--tp-size", "4"], "and the same --tp-size"),
        (["--enable-dp-attention", "--dp", "2", "--tp", "2", "--pp", "2"], "cannot be combined with --pp-size"),
        (["--attn-cp-size", "0"], "--attn-cp-size must be at least 1, and their product at most 256"),
        (["--attn-cp-size", "16", "--tp", "17"], "--attn-cp-size must be at least 1, and their product at most 256"),
        (["--attn-cp-size", "2", "--disaggregation-mode", "decode"], "which a decode server does not compute"),
        (["--attn-cp-size", "2", "--is-embedding"], "--attn-cp-size is for models that say tokens"),
        (["--attn-cp-size", "2", "--enable-dp-attention", "--dp", "2", "--tp", "2"], "each with rows of its own"),
        (["--enable-dp-attention", "--dp", "2", "--tp", "2", "--deterministic"], "which cuts the sums of MLPs"),
        (["--enable-prefill-delayer", "--prefill-delayer-max-delay-passes", "0"], "must be positive"),
        (["--enable-prefill-delayer", "--prefill-delayer-token-usage-low-watermark", "1.5"], "between 0 and 1"),
        (["--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0"], "leave it out"),
        (["--prefill-delayer-queue-min-ratio", "auto"], "need --enable-prefill-delayer"),
        (["--prefill-max-requests", "0"], "--prefill-max-requests must be at least 1"),
        (["--prefill-delayer-forward-passes-buckets", "5", "20"], "need --enable-prefill-delayer"),
        (["--prefill-delayer-wait-seconds-buckets", "1"], "need --enable-prefill-delayer"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(words: list[str], reason: str) -> None:
    with pytest.raises(CommandFailed, match=reason) as failure:
        parse(*words)
    assert failure.value.is_wrong_usage


@pytest.mark.parametrize(
    "words", [['["https://a","http://b:1"]'], ["https://a,http://b:1"], ["https://a", "http://b:1"]]
)
def test_lists_of_words_are_also_read_as_vllm_writes_them(words: list[str]) -> None:
    given = [part for word in words for part in ("--allowed-origins", word)]
    assert parse(*given).allowed_origins == ("https://a", "http://b:1")


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_are_also_called_as_other_servers_call_them(word: str, dtype: str) -> None:
    assert parse("--dtype", word).dtype == dtype


def test_a_list_in_json_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse("--allowed-origins", '["https://a"')


@pytest.mark.parametrize("values", [["0", "5"], ["-1"], ["5", "2"], ["5", "5"], ["nan"], ["5", "inf"]])
@pytest.mark.parametrize("name", ["forward-passes", "wait-seconds"])
def test_bounds_of_a_histogram_that_do_not_rise_above_0_are_refused_by_name(name: str, values: list[str]) -> None:
    flag = f"--prefill-delayer-{name}-buckets"
    with pytest.raises(CommandFailed, match=f"^{flag} must be positive and rise$") as failure:
        parse("--enable-prefill-delayer", flag, *values)
    assert failure.value.is_wrong_usage


MODES = {"unified": "null", "prefill": "prefill", "decode": "decode"}


def unusual(name: str) -> list[str]:
    """The flag with a value that is not its default."""
    (field,) = [field for flag, field in flags() if flag == name]
    kind = kind_of(field.name)
    if kind is bool:
        return [name if field.default is False else "--no-" + name.removeprefix("--")]
    values = {"--disaggregation-allow": "10.0.0.0/8", "--schedule-conservativeness": "0.5"}
    return [name, values.get(name, field.metadata["choices"][-1] if field.metadata["choices"] else "77")]


@pytest.mark.parametrize("name", ROLES)
def test_a_flag_that_does_nothing_in_a_role_is_refused_there_by_name(name: str) -> None:
    for role, mode in MODES.items():
        config = plain("--disaggregation-mode", mode, *unusual(name))
        refused = [line for line in without_effect(config) if line.startswith(f"{name} is for ")]
        assert refused == (
            [] if role in ROLES[name].roles else [f"{name} is for {ROLES[name]} servers: {ROLES[name].reason}"]
        )


VALUES = {
    "--tp-size": "2",
    "--pp-size": "2",
    "--attn-cp-size": "2",
    "--dp-size": "2",
    "--page-size": "32",
    "--device": "cuda",
    "--mem-fraction-static": "0.2",
    "--swa-full-tokens-ratio": "0.5",
    "--schedule-conservativeness": "0",
    "--max-stored-responses": "0",
    "--optimistic-prefill-attempts": "0",
    "--disaggregation-local-prefill": "auto",
    "--kv-events-config": "{}",
    "--allowed-host": "tandem.example",
    "--allowed-origins": "https://a.example",
    "--debug-host": "10.0.0.0/8",
    "--disaggregation-allow": "10.0.0.0/8",
}


def broken(config: ServerConfig) -> set[str]:
    return {*violations(config), *without_effect(config)}


@pytest.mark.parametrize("mode", MODES.values())
def test_flags_that_do_not_go_together_are_both_named(mode: str) -> None:
    """Of each flag a value or two that are none by default, where they are taken alone, beside every other flag's."""
    alone = plain("--disaggregation-mode", mode)
    may: list[tuple[str, dict[str, object]]] = []
    for name, field in flags():
        choices = field.metadata["choices"][1:]
        values = [*choices[:1], *choices[1:][-1:]] or [VALUES.get(name, "77")]
        words = [unusual(name)] if kind_of(field.name) is bool else [[name, value] for value in values]
        given = [{field.name: getattr(plain(*one), field.name)} for one in words if name != "--disaggregation-mode"]
        may += [(name.removeprefix("--"), one) for one in given if not broken(replace(alone, **one))]
    for (name, one), (other_name, other) in combinations(may, 2):
        if name != other_name:
            lines = broken(replace(alone, **one, **other))
            assert not [line for line in lines if name not in line or other_name not in line]


def test_only_what_was_asked_for_can_be_refused_for_doing_nothing() -> None:
    for mode in MODES.values():
        assert without_effect(plain("--disaggregation-mode", mode)) == []
    assert set(ROLES) | {need.flag for need in NEEDS} <= {name for name, _ in flags()}


def test_what_is_asked_for_twice_over_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv-load-failure-policy", "fail", "--enable-prefill-delayer"]
    assert cli.main(["serve", "tandem/mini", *PREFILL, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"--enable-prefill-delayer is for unified .*; --kv-load-failure-policy is for decode", error)


def test_all_violations_are_reported_together() -> None:
    with pytest.raises(CommandFailed, match=r"power of two.*--max-running-requests"):
        parse("--page-size", "12", "--max-running-requests", "0")


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ([], OptimisticPolicy.PARK),
        (["--optimistic-prefill-policy", "off"], OptimisticPolicy.OFF),
        (["--optimistic-prefill-policy", "retry"], OptimisticPolicy.RETRY),
        (["--optimistic-prefill-retries", "2"], OptimisticPolicy.RETRY),
        (["--optimistic-prefill-retries", "0"], OptimisticPolicy.OFF),
        (["--optimistic-prefill-attempts", "3"], OptimisticPolicy.PARK),
        (["--optimistic-prefill-attempts", "0"], OptimisticPolicy.OFF),
        (["--optimistic-prefill-policy", "off", "--optimistic-prefill-attempts", "0"], OptimisticPolicy.OFF),
    ],
)
def test_the_optimistic_flags_select_one_policy(words: list[str], policy: OptimisticPolicy) -> None:
    assert optimistic_policy(parse(*PREFILL, *words)) == policy


def test_the_flags_of_the_delayer_reach_the_node() -> None:
    assert settings(parse()).delayer is None
    assert settings(parse("--enable-prefill-delayer")).delayer == DelayerSettings()
    words = ["--prefill-delayer-max-delay-passes", "9", "--prefill-delayer-token-usage-low-watermark", "0.8"]
    words += ["--prefill-delayer-queue-min-ratio", "0.25", "--prefill-delayer-max-delay-ms", "1500"]
    made = settings(parse("--enable-prefill-delayer", *words)).delayer
    assert made == DelayerSettings(9, low_watermark=0.8, queue_min_ratio=0.25, max_delay_ns=Nanos(1500 * MILLISECOND))


def test_a_ratio_of_auto_is_a_gate_that_tunes_itself_on_every_rank_and_the_bounds_are_its_too() -> None:
    words = ["--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "auto"]
    words += ["--prefill-delayer-max-delay-ms", "1500"]
    made = settings(parse(*words)).delayer
    assert made == DelayerSettings(tunes_itself=True, max_delay_ns=Nanos(1500 * MILLISECOND))
    assert made.has_queue_gate
    of_ranks = delayer_settings(parse(*words), DpTopology(attn_dp_size=2))
    assert (of_ranks.tunes_itself, of_ranks.num_ranks) == (True, 2)


def test_the_limit_of_prompts_in_a_batch_reaches_the_node_and_what_its_delayer_waits_for() -> None:
    made = settings(parse("--prefill-max-requests", "3", "--enable-prefill-delayer"))
    assert made.delayer is not None
    assert (made.prompt_batch_max, made.delayer.prompt_batch_max) == (3, 3)
    assert settings(parse()).prompt_batch_max is None


def test_the_numbers_of_the_delayer_are_those_of_the_report() -> None:
    for made in (settings(parse("--enable-prefill-delayer")).delayer, DelayerSettings()):
        assert made is not None
        assert (made.max_delay_passes, made.max_delay_ns, made.queue_min_ratio) == (30, 5 * SECOND, None)


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_the_overlap_switch_reaches_the_node_of_every_role(mode: str) -> None:
    depths = [settings(parse("--disaggregation-mode", mode, *switch)).window_depth for switch in SWITCHES]
    assert depths == [2, 1]


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_each_pipeline_stage_has_a_micro_batch_unless_nothing_overlaps(mode: str) -> None:
    words = ("--disaggregation-mode", mode, "--pp-size", "3")
    made = [settings(parse(*words, *switch)) for switch in SWITCHES]
    assert [(one.num_micro_batches, one.window_depth) for one in made] == [(3, 4), (1, 1)]
    assert settings(parse("--disaggregation-mode", mode)).num_micro_batches == 1


def test_the_size_of_micro_batches_reaches_the_node() -> None:
    assert settings(parse("--pp-size", "2", "--pp-min-micro-batch-size", "3")).min_micro_batch == 3


SWITCHES = ((), ("--disable-overlap-schedule",))


def test_the_buckets_of_the_delayer_reach_the_node_each_on_its_own() -> None:
    passes = ["--prefill-delayer-forward-passes-buckets", "1", "2.5"]
    seconds = ["--prefill-delayer-wait-seconds-buckets", "0.1", "7"]
    for words, own in (
        (passes, {"passes_bounds": (1.0, 2.5)}),
        (seconds, {"seconds_bounds": (0.1, 7.0)}),
        (passes + seconds, {"passes_bounds": (1.0, 2.5), "seconds_bounds": (0.1, 7.0)}),
    ):
        config = parse("--enable-prefill-delayer", "--prefill-delayer-max-delay-passes", "9", *words)
        delays = delayer_waits(config, settings(config))
        assert delays is not None
        assert delays.numbers().keys() == DelayerWaits(9, **own).numbers().keys()


def test_the_flags_of_scheduling_reach_the_node() -> None:
    config = parse(
        *("--disaggregation-mode", "decode", "--page-size", "32", "--max-running-requests", "5"),
        *("--max-queued-requests", "7", "--chunked-prefill-size", "64", "--disable-overlap-schedule"),
        *("--no-enable-mixed-chunk", "--disable-radix-cache", "--num-reserved-decode-tokens", "9"),
        *("--schedule-conservativeness", "0.5", "--stall-timeout", "2", "--kv-load-failure-policy", "fail"),
    )
    assert settings(config) == NodeSettings(
        role=Role.DECODE,
        incarnation=Incarnation("server", "1"),
        num_pages=100,
        page_size=32,
        layout="digest",
        max_running=5,
        max_queued=7,
        chunk_tokens=64,
        window_depth=1,
        prefill_stall=PrefillStall(Nanos(80 * MILLISECOND)),
        prefix_cache=False,
        reserved_decode_tokens=9,
        conservativeness=0.5,
        result_slots=10,
        load_failure=LoadFailurePolicy.FAIL,
        server_began_at=Nanos(5),
        stall_timeout_ns=2 * SECOND,
        prefill_info=PrefillInfo(method=LoadBalanceMethod.ROUND_ROBIN),
    )


def test_prompts_stall_nobody_where_nobody_decodes() -> None:
    assert settings(parse("--max-prefill-stall-ms", "40")).prefill_stall == PrefillStall(Nanos(40 * MILLISECOND))
    assert settings(parse("--max-prefill-stall-ms", "0")).prefill_stall is None
    assert settings(parse(*PREFILL)).prefill_stall is None


def test_the_hook_of_forced_retries_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "0.25")
    assert settings(parse()).force_retry_prob == 0.25
    monkeypatch.setenv("TANDEM_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB", "0.5")
    assert settings(parse()).force_retry_prob == 0.5


def test_the_flags_of_the_pair_reach_the_node() -> None:
    words = ("--disaggregation-metadata-slots", "7", "--disaggregation-park-max-tokens", "11")
    prefill = settings(parse(*PREFILL, "--optimistic-prefill-attempts", "3", *words))
    assert (prefill.optimistic, prefill.park_attempts) == (OptimisticPolicy.PARK, 3)
    assert (prefill.result_slots, prefill.park_max_tokens) == (7, 11)
    several_ranks = plain(*PREFILL, "--disaggregation-dp-rank-conflict", "fail")
    assert settings(several_ranks).prefill_info == PrefillInfo(conflict=DpConflictPolicy.FAIL)
    by_turns = plain(*PREFILL, "--load-balance-method", "round_robin")
    assert settings(by_turns).prefill_info == PrefillInfo(method=LoadBalanceMethod.ROUND_ROBIN)
    retrying = settings(parse(*PREFILL, "--optimistic-prefill-retries", "4"))
    assert (retrying.optimistic, retrying.optimistic_retries) == (OptimisticPolicy.RETRY, 4)
    decode = ("--disaggregation-mode", "decode")
    usual = settings(parse(*decode))
    assert (usual.local_prefill, usual.prefix_cache) == (LocalPrefill.OFF, True)
    other = settings(parse(*decode, "--disaggregation-local-prefill", "40", *NO_DECODE_CACHE))
    assert (other.local_prefill, other.local_prefill_tokens, other.prefix_cache) == (LocalPrefill.UP_TO, 40, False)
    auto = settings(parse(*decode, "--disaggregation-local-prefill", "auto"))
    assert auto.local_prefill is LocalPrefill.AUTO
    late = settings(parse(*decode, "--disaggregation-decode-allocation-policy", "prefill_complete"))
    assert (usual.allocation, late.allocation) == (AllocationPolicy.EARLY, AllocationPolicy.PREFILL_COMPLETE)


def test_the_flags_of_queues_reach_the_node() -> None:
    usual = settings(parse())
    assert (usual.schedule_policy, usual.priorities) == (SchedulePolicy.FCFS, None)
    longest = settings(parse("--schedule-policy", "lpm", *PRIORITIES))
    assert (longest.schedule_policy, longest.priorities) == (SchedulePolicy.LPM, PrioritySettings(False, 10))
    low = settings(parse(*PRIORITIES, *LOW_FIRST, "--priority-scheduling-preemption-threshold", "3"))
    assert low.priorities == PrioritySettings(low_values_first=True, preemption_threshold=3)


def test_the_timeouts_of_a_pair_come_from_the_environment_and_are_the_deadline_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = settings(parse())
    assert (usual.bootstrap_timeout_ns, usual.waiting_timeout_ns, usual.force_query) == (None, None, False)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "300")
    monkeypatch.setenv("TANDEM_DISAGGREGATION_WAITING_TIMEOUT", "0.5")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK", "1")
    made = settings(parse())
    assert (made.bootstrap_timeout_ns, made.waiting_timeout_ns) == (300 * SECOND, SECOND // 2)
    assert made.force_query


def test_the_heartbeat_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat() == Heartbeat() == Heartbeat(Nanos(SECOND), 4)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2.5")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "2")
    assert heartbeat() == Heartbeat(Nanos(5 * SECOND // 2), 2)


def out_of_range(variable: Variable) -> list[str]:
    if variable.is_switch:
        return ["maybe", "2"]
    return ["often", "nan", "inf", str(variable.least - 0.01), "1e99", *(["1.5"] if variable.is_whole else [])]


@pytest.mark.parametrize("variable", ENVIRONMENT, ids=lambda variable: variable.name)
def test_a_variable_that_is_out_of_range_is_refused_by_name(
    variable: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prefix in ("SGLANG_", "TANDEM_"):
        for text in out_of_range(variable):
            monkeypatch.setenv(prefix + variable.name, text)
            with pytest.raises(
                CommandFailed, match=f"variable {prefix}{variable.name} must be .*, not '{text}'"
            ) as failure:
                parse()
            assert failure.value.is_wrong_usage


def test_the_page_of_flags_has_every_spelling_of_them() -> None:
    page = (DOCS / "flags.md").read_text()
    spellings = [option for action in parser()._actions for option in action.option_strings]
    assert [option for option in spellings if f"`{option}" not in page and option not in ("-h", "--help")] == []


def test_the_page_of_flags_is_generated_from_the_configuration() -> None:
    assert PAGE.read_text() == flags_page(), "python -m tests.flags_page refreshes it"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "usage: tandem COMMAND"),
        ([], 0, "usage: tandem COMMAND"),
        (["--version"], 0, "tandem "),
        (["srve"], 2, "unknown command srve; did you mean serve?"),
    ],
)
def test_the_command_line_helps(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == code
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: tandem {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("/does/not/exist", "does not exist"),
        ("./nor/this", "does not exist"),
        (__file__, "is a file"),
        ("tandem/maxi", "tandem/mini"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(name: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", name, "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem: error: ")
    assert cause in error
    assert error.count("\n") == 1
