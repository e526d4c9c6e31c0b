"""Transition tables: they check themselves, they are total in one of two ways, and terminal states absorb."""

import itertools
from enum import Enum

import pytest

from diagrams import diagram
from tandem.core.disagg.sides import Local
from tandem.core.disagg.transfer_state import RECEIVER, SENDER, TransferState, TransferTrigger
from tandem.core.machine import IllegalTransition, Machine
from tandem.core.request import Request
from tandem.core.scheduler.request_state import LIFECYCLE, SLOT_STATES, Progress, State, Trigger, WaitingFor
from tandem.core.values import Nanos, RequestId

MACHINES = [LIFECYCLE, SENDER, RECEIVER]


class Light(Enum):
    RED = 1
    GREEN = 2
    BROKEN = 3


class Push(Enum):
    GO = 1
    HALT = 2
    FAIL = 3


GOOD = {(Light.RED, Push.GO): Light.GREEN, (Light.GREEN, Push.HALT): Light.RED, (Light.RED, Push.FAIL): Light.BROKEN}


def lights(rules: dict[tuple[Light, Push], Light], initial: tuple[Light, ...] = (Light.RED,)) -> Machine[Light, Push]:
    return Machine("light", initial, frozenset({Light.BROKEN}), rules)


def test_a_sensible_table_is_accepted_and_looked_up() -> None:
    light = lights(GOOD)
    assert light.next(Light.RED, Push.GO) is Light.GREEN


def test_a_table_with_an_unreachable_state_is_refused() -> None:
    with pytest.raises(AssertionError, match="unreachable"):
        lights(GOOD, initial=(Light.BROKEN,))


def test_a_table_with_a_state_that_never_ends_is_refused() -> None:
    with pytest.raises(AssertionError, match="never ends"):
        lights({**GOOD, (Light.GREEN, Push.HALT): Light.GREEN})


def test_a_table_with_rules_for_a_terminal_state_is_refused() -> None:
    with pytest.raises(AssertionError, match="terminal and has rules"):
        lights({**GOOD, (Light.BROKEN, Push.GO): Light.RED})


def test_a_trigger_without_a_rule_raises_and_names_machine_state_and_trigger() -> None:
    with pytest.raises(IllegalTransition, match=r"light.*GREEN.*GO"):
        lights(GOOD).next(Light.GREEN, Push.GO)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_pair_is_in_the_table_or_raises_and_terminal_states_absorb(machine: Machine) -> None:
    (some_state, some_trigger), _ = next(iter(machine.rules.items()))
    for state, trigger in itertools.product(type(some_state), type(some_trigger)):
        if state in machine.terminal:
            assert machine.next(state, trigger) is state
        elif (state, trigger) in machine.rules:
            assert machine.next(state, trigger) is machine.rules[state, trigger]
        else:
            with pytest.raises(IllegalTransition):
                machine.next(state, trigger)


@pytest.mark.parametrize("machine", [SENDER, RECEIVER], ids=lambda machine: machine.name)
def test_a_fault_ends_a_transfer_in_every_open_state(machine: Machine) -> None:
    for state in TransferState:
        if state not in machine.terminal:
            assert machine.next(state, TransferTrigger.FAULT) is TransferState.FAILED


@pytest.mark.parametrize("machine", [SENDER, RECEIVER], ids=lambda machine: machine.name)
def test_a_transfer_never_goes_back_except_to_fail(machine: Machine) -> None:
    for (state, trigger), after in machine.rules.items():
        assert after >= state or trigger is TransferTrigger.FAULT


def test_what_a_peer_may_trigger_has_a_rule_wherever_the_sender_is_ready() -> None:
    for state in (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING):
        for trigger in (TransferTrigger.READY_CHECKED, TransferTrigger.PAGE_MOVED, TransferTrigger.RELEASED):
            assert SENDER.next(state, trigger) is not TransferState.FAILED


def test_agreement_of_many_shards_is_the_minimum() -> None:
    failed, *others = sorted(TransferState)
    assert failed is TransferState.FAILED
    assert min([TransferState.SUCCESS, failed, TransferState.TRANSFERRING]) is failed
    assert min(others) is TransferState.BOOTSTRAPPING
    assert max(others) is TransferState.SUCCESS
    assert min([TransferState.SUCCESS, TransferState.SUCCESS]) is TransferState.SUCCESS


def test_a_request_can_end_in_every_state_that_is_alive() -> None:
    for state in State:
        if state not in (State.DRAINING, State.DONE):
            assert LIFECYCLE.next(state, Trigger.END) is State.DRAINING
    assert LIFECYCLE.next(State.DRAINING, Trigger.DRAINED) is State.DONE


def test_every_wait_has_a_name() -> None:
    request = Request(RequestId(1), "r", 16, (), 1, Nanos(1))
    for state in State:
        waiting_for = Progress(request, Local(), state, Nanos(0), Nanos(0), Nanos(1), 16).waiting_for
        assert (waiting_for is None) == (state is State.DONE)
        assert waiting_for is None or waiting_for in WaitingFor


def test_states_without_a_slot_hold_no_pages_by_name() -> None:
    assert set(State) - set(SLOT_STATES) == {
        State.BOOTSTRAPPING,
        State.AWAITING,
        State.QUEUED,
        State.DRAINING,
        State.DONE,
    }


def test_the_diagram_names_every_rule() -> None:
    for machine in MACHINES:
        drawn = diagram(machine)
        assert drawn.startswith("stateDiagram-v2\n")
        for (state, trigger), after in machine.rules.items():
            (line,) = [line for line in drawn.splitlines() if line.startswith(f"    {state.name} --> {after.name}:")]
            assert trigger.name.lower() in line.partition(": ")[2].split(", ")
