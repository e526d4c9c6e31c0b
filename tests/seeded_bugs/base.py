"""What a mutant is: a context in which one function of the core is another one, wherever it was imported to."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any  # functions of the core, of any shape


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    breaks: Callable[[], Any]  # a context manager
    killed_by: tuple[str, ...]  # the invariant that it is there for; others may notice it on other seeds
    seed: int


MUTANTS: dict[str, Mutant] = {}


def mutant(seed: int, *killed_by: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Any]]:
    def register(breaks: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        context = contextmanager(breaks)
        MUTANTS[breaks.__name__] = Mutant(breaks.__name__, context, killed_by, seed)
        return context

    return register


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """`owner.name` is `new` for a while; for a function of a module, in every module of the core that imported it."""
    old = getattr(owner, name)
    places = [(owner, name)]
    if not isinstance(owner, type):
        modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("tandem.core")]
        places += [(module, key) for module in modules for key, value in vars(module).items() if value is old]
    for place, key in places:
        setattr(place, key, new)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, old)
