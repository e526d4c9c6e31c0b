"""Seeded bugs of the result table."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.disagg import transfer_state


@mutant(0, "S8", "L4")
def result_slot_leaks_at_the_end() -> Iterator[None]:
    def keep(table, request):
        return None

    with replaced(transfer_state.ResultSlots, "maybe_release_metadata_buffer", keep):
        yield


@mutant(0, "S8", "S10", "S13")
def result_slot_is_given_back_twice() -> Iterator[None]:
    original = transfer_state.ResultSlots.maybe_release_metadata_buffer

    def give_back(table, request):
        row = table.owners.get(request)
        original(table, request)
        if row is not None:
            table.free_slots.append(row)

    with replaced(transfer_state.ResultSlots, "maybe_release_metadata_buffer", give_back):
        yield


@mutant(0, "S10")
def another_row_is_given_back() -> Iterator[None]:
    original = transfer_state.ResultSlots.maybe_release_metadata_buffer

    def give_back(table, request):
        had = request in table.owners
        original(table, request)
        if had and len(table.free_slots) > 1:
            table.free_slots[-1] = table.free_slots[0]

    with replaced(transfer_state.ResultSlots, "maybe_release_metadata_buffer", give_back):
        yield


@mutant(0, "S8", "S10")
def result_slot_is_handed_out_twice() -> Iterator[None]:
    def ensure(table, request):
        table.owners.setdefault(request, 0)
        return True

    with replaced(transfer_state.ResultSlots, "ensure_metadata_buffer", ensure):
        yield
