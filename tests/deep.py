"""How deeply JSON is nested where the interpreter gives up reading it: since 3.12 C code has a limit of its own."""

import sys

DEEP = 1_200 if sys.version_info < (3, 12) else 50_000
