"""Imports torch, without the Python rules for the shapes of results: what a worker starts with (`bench/start.py`).

`import torch` reads `torch._meta_registrations` and, for it, the decompositions and references of its operators. They
serve its compiler and tensors without memory. Own models have neither; code of transformers may, and so asks for the
whole. Import this before torch: where torch is there already, or has no such module, nothing is left out.
"""

import importlib
import sys
from types import ModuleType

from tandem.garbage import no_collector

RULES = "torch._meta_registrations"


class _LeftOut(ModuleType):
    """What stands in for the rules, so that nobody reads them."""


if "torch" not in sys.modules:
    sys.modules[RULES] = _LeftOut(RULES)
    with no_collector():
        importlib.import_module("torch")


def read_rules() -> None:
    """From here on torch is whole. For tensors on the meta device, and for whoever compiles."""
    if isinstance(sys.modules.get(RULES), _LeftOut):
        del sys.modules[RULES]
        importlib.import_module(RULES)
