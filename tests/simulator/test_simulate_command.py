"""What `tandem simulate` prints, and where."""

import json
import re

import pytest

from seeded_bugs import MUTANTS
from tandem.cli.main import main
from tandem.cli.simulate import duration_ns
from tandem.core.values import MILLISECOND
from tandem.simulator.oracle import Violation
from tandem.simulator.report import SeedResult
from tandem.simulator.scenario.play import DIVIDER, play


def test_simulate_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "3", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert list(document) == [
        "first_seed", "seeds", "violations", "simulated_hours", "events", "requests", "faults", "log_hash",
    ]  # fmt: skip
    assert document["first_seed"] == 3
    assert document["seeds"] == 1
    assert document["violations"] == []
    assert "seed 3: " in printed.err  # the option set
    assert document["faults"]["message-loss"] > 0
    assert not re.search(r"\bF[0-9]", printed.out + printed.err), "faults have names"


def test_simulate_draws_and_prints_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "1", "--json"]) == 0
    printed = capsys.readouterr()
    first = json.loads(printed.out)["first_seed"]
    assert f"first seed {first}, 1 seeds" in printed.err


def test_simulate_stops_where_it_is_told_and_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "5", "--until", "4s", "--trace"]) == 0
    printed = capsys.readouterr().out.splitlines()
    times = [float(line.split()[0]) for line in printed[:-1] if not line.startswith(" ")]
    assert times
    assert max(times) <= 4.0
    assert any(line.startswith("    < request 1 arrived") for line in printed)


def test_simulate_for_a_while_takes_one_seed_after_another_and_says_what_that_was_worth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--seed", "3", "--for", "1ms", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["first_seed"] == 3
    assert document["seeds"] >= 1
    for unit in ("seeds and ", "simulated hours per minute", "events per second and core"):
        assert unit in printed.err


@pytest.mark.parametrize(
    "flags",
    [["--until", "soon"], ["--for", "0s"], ["--for", "0.0000000001s"], ["--until", "9" * 400],
     ["--seed", "x"], ["--seeds", "0"], ["--sed", "3"]],
)  # fmt: skip
def test_wrong_usage_exits_with_two(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *flags])
    assert left.value.code == 2


@pytest.mark.parametrize(
    "flags",
    [["--for", "1s", "--seeds", "3"], ["--for", "1s", "--until", "1s"], ["--for", "1s", "--trace"],
     ["--trace", "--coverage"]],
)  # fmt: skip
def test_no_option_is_accepted_and_ignored(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_violation_is_one_line_that_reproduces_it(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS["terminal_event_comes_twice"]
    with mutant.breaks():
        assert main(["simulate", "--seed", str(mutant.seed)]) == 1
        line = capsys.readouterr().out.splitlines()[0]
        command, _, comment = line.partition("  # ")
        assert comment.startswith("S12: ")
        assert command.startswith(f"tandem simulate --seed {mutant.seed} --until ")
        assert main(command.split()[1:]) == 1  # pasted into a shell, it shows the same
        again = [text for text in capsys.readouterr().out.splitlines() if text.startswith("tandem simulate")]
        assert [text.partition("  # ")[2] for text in again] == [comment]


@pytest.mark.parametrize("simulated_ns", [4_000_000, 1_019_992_500_000, 3_753_039_119_026, 1_234_567_890_000_000])
def test_the_line_goes_on_until_the_violation_however_late_it_comes(simulated_ns: int) -> None:
    words = SeedResult(1, simulated_ns=simulated_ns).line.split()
    until_ns = duration_ns(words[words.index("--until") + 1])
    assert simulated_ns <= until_ns <= simulated_ns + MILLISECOND


def test_a_violation_is_in_the_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS["terminal_event_comes_twice"]
    with mutant.breaks():
        assert main(["simulate", "--seed", str(mutant.seed), "--json"]) == 1
    (violation,) = json.loads(capsys.readouterr().out)["violations"]
    assert violation["seed"] == mutant.seed
    assert violation["invariant"] == "S12"
    assert violation["line"].endswith("--trace")


def test_a_violation_can_be_shrunk_to_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS["terminal_event_comes_twice"]
    with mutant.breaks():
        assert main(["simulate", "--seed", str(mutant.seed), "--shrink"]) == 1
    printed = capsys.readouterr()
    text = printed.out[printed.out.index("node ") : printed.out.index(DIVIDER)]
    assert "shrunk to " in printed.err
    with mutant.breaks(), pytest.raises(Violation) as broken:
        play(text)
    assert broken.value.invariant == "S12"
