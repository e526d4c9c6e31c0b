"""Train the byte-level BPE tokenizer of the bundled model on the generator's text.

Every digit is its own token, and the alphabet holds all 256 bytes, so any text round-trips.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import problems
import rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "src" / "tandem" / "bundled" / "mini"
VOCABULARY_SIZE = 512
CONTEXT_LENGTH = 8192
PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% set ns = namespace(messages=messages) %}"
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n' }}{% set ns.messages = messages[1:] %}"
    "{% endif %}"
    "{{ '<tools>\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '</tools><|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in ns.messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": '"
    " + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML; tools, calls and results of tools as Hermes and Qwen write them."""


def _texts(seed: int, count: int) -> Iterator[str]:
    """Training rows as text, without the markers of turns."""
    maker = rows.RowMaker(seed)
    for _ in range(count):
        yield "\n".join(text for text, _ in maker.any_row() if not text.startswith(TURN_START))


def build(directory: Path, seed: int = 1, count: int = 20_000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on ``count`` problems and save it to ``directory``."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PADDING, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory, save_jinja_files=False)
    _name_portable_class(directory / "tokenizer_config.json")
    return fast


def load(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that ``build`` saved."""
    return PreTrainedTokenizerFast.from_pretrained(directory)


def _name_portable_class(config_path: Path) -> None:
    """Use field values that every transformers release since 4.40 reads, not only the one that saved the file."""
    config = json.loads(config_path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [TURN_START])
    config.pop("backend", None)
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Build the tokenizer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = build(args.directory, args.seed)
    stream = problems.train_problems(args.seed + 1)
    sample = [next(stream) for _ in range(1000)]
    questions = [len(tokenizer.encode(problem.question)) for problem in sample]
    answers = [len(tokenizer.encode(problem.worked)) for problem in sample]
    print(f"question tokens: mean {sum(questions) / 1000:.0f}, max {max(questions)}")
    print(f"answer tokens: mean {sum(answers) / 1000:.0f}, min {min(answers)}, max {max(answers)}")


if __name__ == "__main__":
    main()
