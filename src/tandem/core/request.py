"""What was asked. A `Request` is frozen; where it is now is `Progress`.

The core never sees token ids: it knows the prompt by its length and one keyed hash per full page.
Prompt tokens and sampling parameters go from the edge to the workers beside the core, under the same id.
"""

from msgspec import Struct

from tandem.core.values import Address, Nanos, PageHash, RequestId, Room


class Request(Struct, frozen=True):
    id: RequestId
    rid: str  # the client's name for it; only compared and hashed
    prompt_len: int  # tokens, >= 1
    page_hashes: tuple[PageHash, ...]  # one per full page of the prompt: prompt_len // page_size
    max_new_tokens: int  # >= 1; means nothing of one that wants a vector
    timeout_ns: Nanos  # time remaining at arrival; bounds everything until the first token
    room: Room | None = None  # both halves of a disaggregated pair carry the same
    peer: Address | None = None  # decode only: the bootstrap server of the prefill that holds the room
    dp_rank_hint: int | None = None  # `disagg_prefill_dp_rank`: who routes says which DP rank of the prefill has it
    priority: int = 0  # how urgent: the larger the more, or the less; read where `NodeSettings.priorities` says how
    prompt_digest: bytes = b""  # `pagehash.prompt_digest`: equal on both halves, or they do not mean the same prompt
    prompt_logprobs_from: int | None = (
        None  # log-probabilities are wanted of what follows each prompt token from here on
    )
    rendered_at: int = 0  # Unix seconds that its chat template has shown; 0: it asked for no time
    wants_vector: bool = False  # it ends with its prompt: what the workers make of that is its result; it has no token
