"""What a grammar costs: the processor time of a decode step of rows that follow one, over that of rows that are free.

    python bench/grammar.py MODEL_DIR [--rows 32] [--threads 1] [--steps 120] [--rounds 5]

Two engines over the same weights take turns, step by step, so that whatever else the machine does meets both. Each
round has two engines of its own: where their memory lies makes a difference of some percent. Prints a table and one
JSON line with the conditions; a ratio is that of the medians of a round, and the round shown is the one in the middle.
`compile_ms`: once per grammar and process, beside the batches.
"""

import argparse
import json
import random
import statistics
import time
from array import array
from pathlib import Path

import torch
from conditions import conditions

from tandem import grammar
from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.weights import LoadedModel, load
from tandem.grammar import Vocabulary
from tandem.sampling import Payload, SamplingParams

PAGE_SIZE = 16
CONTEXT = 256  # tokens in the cache when decoding starts
WARM_UP = 20  # steps
SEED = 7
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
# None of them ends while it is measured.
GRAMMARS = {
    "JSON schema": grammar.from_json_schema({"type": "array", "items": PERSON, "minItems": 1000}),
    "any JSON": grammar.from_json_schema({"type": "array", "items": {"type": "object"}, "minItems": 1000}),
    "expression": grammar.from_regex("([A-Z][a-z]{2,9} [0-9]{1,4}, ){1000}"),
}


class Decoding:
    """One engine with its rows in the decode set."""

    def __init__(self, model: LoadedModel, vocabulary: Vocabulary, made: str, options: argparse.Namespace) -> None:
        pages = ceil_div(CONTEXT + options.steps + WARM_UP + 2, PAGE_SIZE)
        self._engine = Engine(model, page_size=PAGE_SIZE, num_pages=options.rows * pages, vocabulary=vocabulary)
        self._joins: list[Join] = []
        self._steps = 0
        self.milliseconds: list[float] = []
        for row in range(options.rows):
            table = tuple(PageId(row * pages + index) for index in range(pages))
            draw = random.Random(SEED + row)
            prompt = array("i", (draw.randrange(3, model.config.vocab_size) for _ in range(CONTEXT)))
            params = SamplingParams(temperature=options.temperature, seed=row, ignore_eos=True, grammar=made)
            self._engine.add(Payload(row, prompt.tobytes(), params, bytes(16)))
            span = Row(RequestId(row), 0, CONTEXT, 0, table, samples=True)
            self._engine.run(BatchPlan(BatchId(0), 0, BatchKind.PREFILL, rows=(span,)))
            self._joins.append(Join(RequestId(row), 0, table))

    def step(self) -> None:
        joins = tuple(self._joins) if self._steps == 0 else ()
        plan = BatchPlan(BatchId(self._steps), self._steps, BatchKind.DECODE, decodes=True, join=joins)
        began = time.process_time()
        outcome = self._engine.run(plan)
        self.milliseconds.append(1e3 * (time.process_time() - began))
        assert not any(outcome.flags), "no row has ended"
        self._steps += 1

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds[WARM_UP:])

    def close(self) -> None:
        self._engine.close()


def measure(name: str, model: LoadedModel, vocabulary: Vocabulary, options: argparse.Namespace) -> dict[str, object]:
    began = time.perf_counter()
    vocabulary.check(GRAMMARS[name])
    compile_ms = 1e3 * (time.perf_counter() - began)
    rounds = sorted((measure_round(name, model, vocabulary, options) for _ in range(options.rounds)), key=ratio)
    free, bound = rounds[len(rounds) // 2]
    return {
        "grammar": name,
        "rows": options.rows,
        "free_ms_per_step": round(free, 3),
        "bound_ms_per_step": round(bound, 3),
        "ratio": round(bound / free, 3),
        "us_per_token": round(1e3 * (bound - free) / options.rows, 1),
        "ratios": [round(ratio(each), 3) for each in rounds],
        "compile_ms": round(compile_ms, 1),
    }


def measure_round(
    name: str, model: LoadedModel, vocabulary: Vocabulary, options: argparse.Namespace
) -> tuple[float, float]:
    """Milliseconds of a step without the grammar, and with it."""
    free, bound = (Decoding(model, vocabulary, made, options) for made in ("", GRAMMARS[name]))
    for _ in range(options.steps + WARM_UP):
        free.step()
        bound.step()
    free.close()
    bound.close()
    return free.median, bound.median


def ratio(medians: tuple[float, float]) -> float:
    free, bound = medians
    return bound / free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, device="cpu")
    vocabulary = Vocabulary(options.model / "tokenizer.json", size=model.config.vocab_size)
    results = [measure(name, model, vocabulary, options) for name in GRAMMARS]
    for row in results:
        print(
            f"{row['grammar']:12s} {row['rows']:3d} rows  free {row['free_ms_per_step']:8.3f} ms  bound "
            f"{row['bound_ms_per_step']:8.3f} ms  ratio {row['ratio']:.3f}  {row['us_per_token']:6.1f} us per token  "
            f"compiled in {row['compile_ms']:.1f} ms  ratios {row['ratios']}"
        )
    said = {"temperature": options.temperature, "threads": options.threads, "context_tokens": CONTEXT}
    print(json.dumps({"steps": results, "conditions": conditions() | said}))


if __name__ == "__main__":
    main()
