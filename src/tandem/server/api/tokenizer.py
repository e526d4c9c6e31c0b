"""Text to token ids and back, and conversations to text, from the files of a Hugging Face model directory.

`tokenizer.json` is run by the `tokenizers` library; the chat template by a sandboxed jinja2, with the globals that
published templates rely on. transformers is not needed.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn  # templates and JSON files hold values of any type

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.grammar import Vocabulary
from tandem.server.api.bounds import LOOP_CHARS
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.render_time import RenderTime

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # as SentencePiece names them
NORMALIZED_CHARS = 4  # that a normalizer makes one of, at most
# What a template may make of messages and variables that it was not written for.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class RenderedChat(NamedTuple):
    text: str
    rendered_at: int  # Unix seconds that the template has asked for; 0: it shows no time


class Tokenizer:
    """The tokenizer of one model, loaded once; every method but the constructor may be called from any thread."""

    def __init__(self, directory: Path, *, template: str = "") -> None:
        """Raises `ValueError` with a remedy when the directory holds no usable tokenizer.

        template: for chats, in place of those of the directory.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: save the model with its fast tokenizer (tokenizer.json)")
        self._path = path
        self._vocabulary: Vocabulary | None = None
        definition = json.loads(path.read_text(encoding="utf-8"))
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = read_tokenizer_config(directory)
        self.special_tokens = special_tokens(self._config)
        self._mark_special(self.special_tokens.values())
        self.templates = given_template(template) if template else read_templates(directory, self._config)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoder = definition.get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self._drop_bos = None
        if self._config.get("add_bos_token") is False and "bos_token" in self.special_tokens:
            self._drop_bos = self._tokenizer.token_to_id(self.special_tokens["bos_token"])
        self._chars_in_turn = 0  # encoded on the event loop since others had their turn

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._ids(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_anywhere(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode`, but neither a long text nor many short ones hold up the event loop.

        `encode_batch_fast` lets go of the interpreter lock, and does not find out where tokens stand in the text, which
        takes longer than all else and a quarter more memory. After every `LOOP_CHARS` of short texts others have their
        turn.
        """
        if len(text) <= LOOP_CHARS:
            await self._in_turn(len(text))
            return self.encode(text, add_special_tokens=add_special_tokens)
        encode = self._tokenizer.encode_batch_fast
        (encoding,) = await asyncio.to_thread(encode, [text], add_special_tokens=add_special_tokens)
        return self._ids(encoding)

    async def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Two texts as the model reads them together, and where the second begins; None where types do not tell."""
        if len(first) + len(second) <= LOOP_CHARS:
            await self._in_turn(len(first) + len(second))
            encoding = self.encode_here(first, second)
        else:
            (encoding,) = await asyncio.to_thread(self._tokenizer.encode_batch, [(first, second)])
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def encode_here(self, first: str, second: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(first, second)

    async def _in_turn(self, num_chars: int) -> None:
        """Returns when so many may be encoded on the event loop."""
        self._chars_in_turn += num_chars + 1
        if self._chars_in_turn > LOOP_CHARS:
            self._chars_in_turn = 0
            await asyncio.sleep(0)

    def may_fit(self, text: str, num_tokens: int) -> bool:
        """False for a text that cannot be that few tokens, without encoding it; true where only that would tell."""
        return not self.is_byte_level or len(text) <= num_tokens * self._longest_token * NORMALIZED_CHARS

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, id: int) -> str:
        """One token within a text, as logprobs show it, with its space; incomplete characters appear as U+FFFD."""
        return self._token_text(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; exact for those that are bytes, else those of `token_text`."""
        if self.is_byte_level and id < len(self.byte_table):
            return self.byte_table[id]
        byte = byte_of(self.token_name(id))
        return self._token_text(id).encode() if byte is None else byte

    def token_name(self, id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(id)

    def token_names(self, ids: Sequence[int]) -> list[str | None]:
        return list(map(self.token_name, ids))

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Special tokens as texts spell them."""
        return {name: id for id in self.special_ids if (name := self.token_name(id))}

    @cached_property
    def grammar_marks(self) -> dict[str, int]:
        """Tokens that a grammar has to name, as no text in it can spell them: the special ones, and what was added in
        angle brackets. llguidance takes those for special whatever the file says: `<think>` of Qwen3, which says no."""
        added = self._tokenizer.get_added_tokens_decoder()
        bracketed = (id for id, token in added.items() if token.content[:1] == "<" and token.content[-1:] == ">")
        return self.special_names | {added[id].content: id for id in bracketed}

    @property
    def opened_vocabulary(self) -> Vocabulary | None:
        """What grammars are compiled for, once `open_vocabulary` has read it."""
        return self._vocabulary

    def open_vocabulary(self) -> Vocabulary:
        """Takes a second with a large vocabulary. Raises GrammarError where no grammar can be followed."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._path)
        return self._vocabulary

    @cached_property
    def byte_table(self) -> list[bytes]:
        """Bytes of every token id of a byte-level vocabulary, as its decoder maps them; absent ids have none."""
        assert self.is_byte_level
        to_byte = byte_alphabet()
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        table = [b""] * (highest + 1)
        for token, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            try:
                table[id] = bytes([to_byte[char] for char in token])
            except KeyError:  # an added token, written as it is
                table[id] = token.encode()
        return table

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(map(len, self.byte_table))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        rendered_at: int,
    ) -> RenderedChat:
        """The conversation as the model expects to read it. Raises `Refusal` when the template will not have it.

        A function of its arguments alone, on every server that has the same model. `rendered_at`: Unix seconds, for
        templates that show the time.
        """
        template = self._template_for(variables)
        if template is None:
            raise Refusal(Problem.NO_CHAT_TEMPLATE, "this model has no chat template", param="messages")
        time = RenderTime(rendered_at)
        try:
            text = template.render(
                **{
                    "tools": None,
                    "documents": None,
                    "strftime_now": time,
                    **self.special_tokens,
                    **variables,
                    "messages": list(map(self._known, messages)),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TEMPLATE_ERRORS as error:
            raise Refusal(
                Problem.REFUSED_BY_TEMPLATE, f"messages: the chat template refuses them: {error}", param="messages"
            ) from None
        return RenderedChat(text, time.shown)

    def _known(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """By a role that the template has: OpenAI's newer name of the system is left out by most."""
        if message.get("role") == "developer" and not self._knows_developers:
            return {**message, "role": "system"}
        return message

    @cached_property
    def _knows_developers(self) -> bool:
        return any("developer" in source for source in self.templates.values())

    @cached_property
    def reads_functions_of_messages(self) -> bool:
        """And not from the variable `tools`, as all others do: Phi-4-mini's template."""
        return any("message['tools']" in source for source in self.templates.values())

    def _mark_special(self, names: Iterable[str]) -> None:
        """Those that tokenizer.json has, but not as special ones: it is the configuration that says what they are."""
        added = self._tokenizer.get_added_tokens_decoder()
        ids = {name: self._tokenizer.token_to_id(name) for name in names}
        plain = (name for name, id in ids.items() if id is not None and not (id in added and added[id].special))
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in plain])

    def _ids(self, encoding: tokenizers.Encoding) -> list[int]:
        ids = encoding.ids
        if self._drop_bos is not None and ids and ids[0] == self._drop_bos and encoding.special_tokens_mask[0]:
            return ids[1:]
        return ids

    @cached_property
    def _token_text(self) -> Callable[[int], str]:
        return lru_cache(1 << 16)(self._text_after_another)

    def _text_after_another(self, id: int) -> str:
        """What a decoder that drops the space before its first token makes of this one behind a word."""
        if self.plain_word is not None:
            before = self.decode([self.plain_word], skip_special_tokens=False)
            both = self.decode([self.plain_word, id], skip_special_tokens=False)
            if both.startswith(before) and len(both) > len(before):
                return both.removeprefix(before)
        return self.decode([id], skip_special_tokens=False)

    @cached_property
    def plain_word(self) -> int | None:
        """Any token that is plain letters; None where no decoder cares what is before a token."""
        if self.is_byte_level:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        plain = (id for id in range(self.vocab_size) if id not in added and byte_of(self.token_name(id)) is None)
        return next((id for id in plain if (text := self.decode([id])).isascii() and text.isalpha()), None)

    def _template_for(self, variables: Mapping[str, Any]) -> jinja2.Template | None:
        """Some models have one of its own for chats with tools."""
        return self._template("tool_use" if variables.get("tools") and "tool_use" in self.templates else "default")

    @cached_property
    def _template(self) -> Callable[[str], jinja2.Template | None]:
        return lru_cache(2)(self._compiled)

    def _compiled(self, name: str) -> jinja2.Template | None:
        """Raises `Refusal` when what the model brings is none: all that needs no chat is served."""
        source = self.templates.get(name)
        try:
            return None if source is None else environment().from_string(source)
        except TEMPLATE_ERRORS as error:
            detail = f"the chat template of this model cannot be compiled: {error}"
            raise Refusal(Problem.NO_CHAT_TEMPLATE, detail, param="messages") from None


def byte_of(name: str | None) -> bytes | None:
    """What a token of byte fallback stands for; None for any other token."""
    found = None if name is None else BYTE_TOKEN.fullmatch(name)
    return None if found is None else bytes.fromhex(found.group(1))


# the files


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Where it has no `added_tokens_decoder`, a file beside it names special tokens, as transformers once had it."""
    config = read_json(directory / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | read_json(directory / "special_tokens_map.json")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on, and those of this model alone, as templates name them; a file may hold the text or an
    object around it.
    """
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    found: dict[str, str] = {}
    for key, value in (named | (extra if isinstance(extra, dict) else {})).items():
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own win over `tokenizer_config.json`, as in transformers."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {}


def given_template(source: str) -> dict[str, str]:
    """Why compiled at once: a model may bring a template that nobody uses, but who gives one wants it."""
    try:
        environment().from_string(source)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"--chat-template cannot be compiled: {error}") from None
    return {"default": source}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable bytes stand for themselves, the others for U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


# the templates


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it is just its body,
    with variables of its own.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return [jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))]


@lru_cache(1)
def environment() -> jinja2.Environment:
    """As transformers compiles chat templates, without what gives another text each time."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals.pop("lipsum", None)
    made.filters.pop("random", None)
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
