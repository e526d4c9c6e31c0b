"""Where one life of a prefill may be dialled: what one bootstrap server tells takes nothing from another."""

from tandem.core.values import Address
from tandem.server.node.candidates import MAX_ENDPOINTS, MAX_VOUCHERS, Candidates

HERE, THERE = (Address("127.0.0.1", 8998), 0), (Address("localhost", 8998), 0)
RIGHT, WRONG = ("127.0.0.1", 5), ("127.0.0.1", 6)


def test_two_addresses_that_name_one_endpoint_hold_it_until_neither_does() -> None:
    it = Candidates()
    for voucher in (HERE, THERE):
        it.vouch(voucher, RIGHT)
    it.withdraw(HERE)
    assert it.endpoints == [RIGHT]
    it.withdraw(THERE)
    assert it.endpoints == []


def test_an_address_that_changes_its_mind_takes_back_its_own_word_only() -> None:
    it = Candidates()
    it.vouch(HERE, RIGHT)
    it.vouch(THERE, RIGHT)
    it.vouch(THERE, WRONG)
    assert it.endpoints == [RIGHT, WRONG]
    it.vouch(THERE, RIGHT)
    assert it.endpoints == [RIGHT]


def test_when_the_one_that_was_right_is_gone_guesses_are_no_hope() -> None:
    it = Candidates()
    it.vouch(HERE, RIGHT)
    it.vouch(THERE, WRONG)
    it.prove(RIGHT)
    it.remove(RIGHT)
    assert it.endpoints == []


def test_while_nothing_was_right_every_guess_is_kept() -> None:
    it = Candidates()
    it.vouch(HERE, RIGHT)
    it.vouch(THERE, WRONG)
    it.remove(WRONG)
    assert it.endpoints == [RIGHT]


def test_guesses_without_end_push_each_other_out_and_never_the_one_that_was_right() -> None:
    it = Candidates()
    it.vouch(HERE, RIGHT)
    it.prove(RIGHT)
    for port in range(100, 200):
        it.vouch((Address("127.0.0.1", port), 0), ("127.0.0.1", port))
    assert len(it.endpoints) == MAX_ENDPOINTS
    assert it.endpoints[0] == RIGHT
    for endpoint in it.endpoints:
        it.prove(endpoint)
    it.vouch(THERE, WRONG)
    assert WRONG not in it.endpoints


def test_an_endpoint_that_too_many_vouch_for_to_be_remembered_does_not_depend_on_them() -> None:
    it = Candidates()
    for port in range(MAX_VOUCHERS + 1):
        it.vouch((Address("127.0.0.1", port), 0), RIGHT)
    for port in range(MAX_VOUCHERS + 1):
        it.withdraw((Address("127.0.0.1", port), 0))
    assert it.endpoints == [RIGHT]
