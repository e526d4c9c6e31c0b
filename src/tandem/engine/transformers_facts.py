"""What transformers says of an architecture for which Tandem has no code of its own, without transformers or torch.

Both are needed to find it out (`models/transformers_examination.py`), and the API process has neither: it starts a
process to ask, a worker asks where it is.
"""

import importlib
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any  # values of JSON documents

import msgspec

from tandem.engine.documents import ModelError
from tandem.logtext import shown
from tandem.programs import module_command, working_folder

EXTRA = "pip install 'tandem-llm[transformers]'"
EXAMINATION = "tandem.engine.models.transformers_examination"
EXAMINATION_S = 300.0  # most of it goes into imports, where a disk is slow
REFUSED = 3  # its exit code; the reason is the last line of its stderr
DECODER = re.compile(r"[A-Za-z][A-Za-z0-9_]{,99}(ForCausalLM|LMHeadModel)")  # how transformers names them


@dataclass(frozen=True, slots=True)
class TransformersFacts:
    """A decoder that transformers computes, as its own code behaved when it was examined."""

    version: str  # of transformers
    model_type: str
    settings: str  # config.json as transformers has completed it, a JSON object
    vocab_size: int
    hidden_size: int  # of what the head is given
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    scale: float  # of attention scores
    soft_cap: float | None  # of the same
    windows: tuple[int | None, ...]  # of each layer

    @property
    def library(self) -> str:
        return f"transformers {self.version}"


Examine = Callable[[dict[str, Any]], TransformersFacts]  # of what config.json holds; raises ModelError


def examined_elsewhere(raw: dict[str, Any]) -> TransformersFacts:
    """In a process that ends with it. Raises ModelError."""
    _refuse_others(raw)
    try:
        done = subprocess.run(
            module_command(EXAMINATION),
            cwd=working_folder(),
            input=json.dumps(raw),
            capture_output=True,
            text=True,
            check=False,
            timeout=EXAMINATION_S,
        )
    except subprocess.TimeoutExpired:
        raise refused(raw, f"transformers has not described it within {EXAMINATION_S:.0f} s") from None
    except OSError as error:
        raise ModelError(f"transformers cannot be asked about config.json ({error.strerror})") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"its examination ended with {done.returncode}"])[-1]
        if done.returncode == REFUSED:
            raise ModelError(last)
        raise refused(
            raw, f"Tandem has no code of its own for it, and transformers does not run here ({last}); {EXTRA}"
        )
    return msgspec.json.decode(done.stdout, type=TransformersFacts)


def examined_here(raw: dict[str, Any]) -> TransformersFacts:
    """In this process, which needs transformers anyway. Raises ModelError."""
    _refuse_others(raw)
    return importlib.import_module(EXAMINATION).examine(raw)


def refused(raw: dict[str, Any], reason: str) -> ModelError:
    name = raw["architectures"][0]
    return ModelError(f"config.json: the architecture {shown(name)} is not supported: {reason}")


def _refuse_others(raw: dict[str, Any]) -> None:
    name, model_type = raw["architectures"][0], raw.get("model_type")
    if not DECODER.fullmatch(name) or not isinstance(model_type, str):
        raise refused(raw, "only decoders can be served, and this is the name of none (docs/models.md)")
    if raw.get("quantization_config") is not None:
        raise refused(raw, "its weights are quantised, which is for Tandem's own architectures; take the plain ones")
    if find_spec("transformers") is None:
        raise refused(raw, f"Tandem has no code of its own for it, and transformers is not installed; {EXTRA}")
