#!/usr/bin/env bash
# One command: what `bench/gpu.py` says, in the environment of `make`, which it makes first where it is not there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || make setup
exec timeout --signal=INT 600 .venv/bin/python -m bench.gpu "$@"
