"""What the engine knows of one request: its tokens, its page table, and the hash chain of the pages it has filled."""

from array import array
from dataclasses import dataclass, field

from tandem.engine.sampler import History
from tandem.pagehash import hash_of, page_link
from tandem.sampling import Payload, SamplingParams


@dataclass(slots=True)
class Sequence:
    request: int
    params: SamplingParams
    prompt_len: int
    page_size: int
    tokens: array  # int32: prompt, then output
    history: History | None  # token counts, only where a penalty needs them
    prompt_hash: bytes  # link of the last full prompt page, or the root: parent of `chain[0]`
    chain: list[bytes] = field(default_factory=list)  # links of the full pages after the full prompt pages
    num_reported: int = 0  # how many of `chain` the node has been told
    pages: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, payload: Payload, *, page_size: int) -> "Sequence":
        tokens = array("i")
        tokens.frombytes(payload.tokens)
        assert len(tokens) >= 1, "a prompt has at least one token"
        return cls(
            request=payload.request,
            params=payload.sampling,
            prompt_len=len(tokens),
            page_size=page_size,
            tokens=tokens,
            history=History.of(payload.sampling, tokens),
            prompt_hash=payload.last_hash,
        )

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    def set_pages(self, first_page: int, pages: tuple[int, ...]) -> None:
        """Cut the table to `first_page` entries, then append `pages`."""
        assert first_page <= len(self.pages), "a page table has no gaps"
        del self.pages[first_page:]
        self.pages.extend(pages)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)

    def cut(self, stop: int) -> None:
        """Forget the tokens from `stop` on: they are about to be sampled again. A prompt is never cut."""
        if stop >= len(self.tokens):
            return
        assert stop >= self.prompt_len
        outputs = self.tokens[self.prompt_len : stop]
        del self.tokens[stop:]
        del self.chain[max(0, stop // self.page_size - self.prompt_len // self.page_size) :]
        self.num_reported = min(self.num_reported, len(self.chain))
        self.history = History.of(self.params, self.tokens[: self.prompt_len])
        if self.history is not None:
            for token in outputs:
                self.history.add(token)

    def take_hashes(self, stop: int) -> list[bytes]:
        """Hashes of full pages of [0, stop) that nobody was told yet: each page that holds output, once, in order."""
        first = self.prompt_len // self.page_size
        while len(self.chain) < stop // self.page_size - first:
            start = (first + len(self.chain)) * self.page_size
            parent = self.chain[-1] if self.chain else self.prompt_hash
            self.chain.append(page_link(parent, self.tokens[start : start + self.page_size]))
        new = self.chain[self.num_reported : max(0, stop // self.page_size - first)]
        self.num_reported += len(new)
        return [hash_of(link) for link in new]
