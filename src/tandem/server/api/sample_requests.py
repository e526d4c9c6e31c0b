"""From prompts and their parameters to what the node is asked: one request for each sample, with its room and seed.

Both halves of a disaggregated pair get the same body and do this each on its own, so everything here is a function of
the body: two halves that disagree about a prompt, a seed or a room would not meet. Whatever is wrong with a request is
found here, before anything is reserved.
"""

import hashlib
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import Any  # a value that may be one or one per prompt

import msgspec
from msgspec import Struct

from tandem.core.disagg.message_checks import MAX_PROMPT_EXTRA_BYTES
from tandem.core.request import Request
from tandem.core.settings import MAX_DP_SIZE, dp_rank_in
from tandem.core.values import MAX_TIMEOUT_SECONDS, SECOND, Address, Cause, Nanos, RequestId, Room
from tandem.pagehash import hash_of, prompt_digest, prompt_links, root_hash
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.api.allowed_hosts import without_brackets
from tandem.server.api.body import Routing, per_prompt, unsupported
from tandem.server.api.bounds import (
    ALTERNATIVE_BYTES,
    MAX_INT,
    MAX_PORT,
    MAX_PROMPT_SCORES,
    MAX_RID_CHARS,
    MAX_ROOM,
    MAX_SAMPLES,
    MAX_SUBMITTED_TOKENS,
    MIN_INT,
    SCORE_BYTES,
)
from tandem.server.api.errors import Refusal, contradiction, invalid
from tandem.server.api.limits import ModelLimits
from tandem.server.api.resume import Said
from tandem.server.api.validation import GenerationParams, Prompt


class PeerParams(Struct, frozen=True):
    """What a body says of the other half."""

    room: Room | None = None
    peer: Address | None = None  # decode: the prefill's bootstrap server
    dp_rank_hint: int | None = None  # of the prefill; both halves are told, and both refuse one that cannot be


class SampleRequest(Struct, frozen=True):
    """One sample of one prompt: becomes one request of the core."""

    index: int  # among all samples of the HTTP request: prompt * n + sample
    prompt_index: int
    prompt: Prompt
    params: GenerationParams
    sampling: SamplingParams  # `params.sampling` with the seed of this sample
    max_new_tokens: int  # 0: the token that the node makes anyway is not shown
    rid: str
    names: tuple[str, ...]  # rids by which it can be aborted
    pair: PeerParams
    tenant: str
    timeout_ns: int  # from arrival
    dp_rank: int | None = None  # of this server, that the request asks for
    nonce: str = ""  # of the HTTP request: what its answer names is named after it
    said: Said | None = None  # of a stream that goes on here
    priority: int = 0

    @property
    def num_said(self) -> int:
        return 0 if self.said is None else len(self.said.tokens)

    @property
    def has_ended(self) -> bool:
        """Nothing can follow what was said elsewhere: it is not computed here."""
        return self.said is not None and self.said.ends is not None


def ask_all(
    routing: Routing,
    prompts: Sequence[Prompt],
    all_params: Sequence[GenerationParams],
    limits: ModelLimits,
    *,
    own_rid: str,
    tenant: str,
    timeout_ns: int,
    seed_rooms: Sequence[int] = (),
) -> list[SampleRequest]:
    """All samples of all prompts, in order. `all_params` has one per prompt; `own_rid` if the client gave none.

    Raises `Refusal` for what no server takes; of the bounds of this one `beyond` tells.
    seed_rooms: with which the draws of a stream that goes on here began, one for each sample.
    """
    check_samples(prompts, all_params)
    priority = check_priority(routing, limits)
    dp_ranks = check_dp_ranks(routing, [params.n for params in all_params])
    pairs = check_pairs(routing, [params.n for params in all_params], limits)
    rids = check_rids(routing.rid, len(prompts), own_rid)
    group = (routing.rid,) if isinstance(routing.rid, str) and routing.rid else ()
    seeded = dict(enumerate(map(Room, seed_rooms)))
    asks: list[SampleRequest] = []
    for prompt_index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
        space = limits.context_length - len(prompt.tokens)
        for sample in range(params.n):
            base = rids[prompt_index]
            rid = base if params.n == 1 else f"{base}_{sample}"
            pair = pairs[len(asks)]
            asks.append(
                SampleRequest(
                    index=len(asks),
                    prompt_index=prompt_index,
                    prompt=prompt,
                    params=params,
                    sampling=with_seed(params, sample, seeded.get(len(asks), pair.room)),
                    max_new_tokens=space if params.max_new_tokens is None else min(params.max_new_tokens, space),
                    rid=rid,
                    names=tuple(dict.fromkeys((rid, base, *group))),
                    pair=pair,
                    tenant=tenant,
                    timeout_ns=timeout_ns,
                    dp_rank=dp_ranks[len(asks)],
                    priority=priority,
                    nonce=own_rid,
                )
            )
    if len({ask.rid for ask in asks}) < len(asks):
        raise contradiction("rid", "the samples of two prompts would have the same name")
    return asks


def check_samples(prompts: Sequence[Prompt], all_params: Sequence[GenerationParams]) -> None:
    """However they are made up of prompts and `n`, all samples go to the node together."""
    num_samples = sum(params.n for params in all_params)
    if num_samples > MAX_SAMPLES:
        raise contradiction("n", f"{num_samples} samples in one request; at most {MAX_SAMPLES} are accepted")
    num_tokens = sum(params.n * len(prompt.tokens) for prompt, params in zip(prompts, all_params, strict=True))
    if num_tokens > MAX_SUBMITTED_TOKENS:
        raise contradiction("n", f"{num_tokens} prompt tokens in {num_samples} samples; at most {MAX_SUBMITTED_TOKENS}")
    counts = [num_scores(prompt, params) for prompt, params in zip(prompts, all_params, strict=True)]
    if sum(params.n * count for params, count in zip(all_params, counts, strict=True)) > MAX_PROMPT_SCORES:
        raise contradiction(
            "logprobs", f"of more than {MAX_PROMPT_SCORES} prompt tokens and alternatives in one request"
        )
    for prompt, params in zip(prompts, all_params, strict=True):
        check_scores(prompt, params)


def num_scores(prompt: Prompt, params: GenerationParams) -> int:
    """Prompt tokens of which something is told, and alternatives."""
    first = params.sampling.prompt_logprobs_from
    each = 1 + params.sampling.prompt_top_logprobs + len(params.sampling.logprob_ids)
    return 0 if first is None else (len(prompt.tokens) - first) * each


def check_scores(prompt: Prompt, params: GenerationParams) -> None:
    """They travel from prefill to decode in one message."""
    num_bytes = num_scores(prompt, params) * ALTERNATIVE_BYTES + len(prompt.tokens) * (SCORE_BYTES - ALTERNATIVE_BYTES)
    if params.sampling.prompt_logprobs_from is not None and num_bytes > MAX_PROMPT_EXTRA_BYTES:
        raise contradiction(
            "logprobs", f"of a prompt of {len(prompt.tokens)} tokens are too many: ask for fewer of them"
        )


def check_priority(routing: Routing, limits: ModelLimits) -> int:
    """A number that nobody reads must not look as if it were honoured."""
    if limits.unsaid_priority is not None:
        return limits.unsaid_priority if routing.priority is None else routing.priority
    if routing.priority:
        raise unsupported(
            "priority", ": the scheduler reads it with --enable-priority-scheduling only; leave it out or send 0"
        )
    return 0


def priority_of(routing: Routing, header: str | None) -> int | None:
    """As a gateway before us says, else as the body does."""
    if header is None:
        return routing.priority
    try:
        number = int(header)
    except ValueError:
        number = MAX_INT + 1
    if not MIN_INT <= number <= MAX_INT:
        raise invalid("X-Override-Priority", "must be an integer of at most 64 bits")
    return number


def follow_gateway(routing: Routing, header: str | None) -> None:
    """X-Data-Parallel-Rank, the rank of whoever gets it, comes before what the body says."""
    if header is None:
        return
    if (rank := dp_rank_in(header)) is None:
        raise invalid("X-Data-Parallel-Rank", f"must be an integer from 0 to {MAX_DP_SIZE - 1}")
    routing.routed_dp_rank, routing.data_parallel_rank = rank, None


def submission(ask: SampleRequest, request: RequestId, arrival_ns: int, limits: ModelLimits) -> wire.Submit:
    """What goes to the node: the request, with what is left of its deadline, and the payload for the workers."""
    passed_ns = time.monotonic_ns() - arrival_ns
    remaining_ns = ask.timeout_ns - passed_ns
    if remaining_ns <= 0:
        message = "the deadline passed while the request was being read"
        raise Refusal(Cause.DEADLINE_EXCEEDED, message, waited_seconds=passed_ns / SECOND)
    root = root_hash(secret=limits.keys.pages, tenant=ask.tenant)
    tokens = ask.prompt.tokens if ask.said is None else ask.prompt.tokens + ask.said.tokens
    links = prompt_links(root, tokens, page_size=limits.page_size)
    return wire.Submit.of(
        Request(
            id=request,
            rid=ask.rid,
            prompt_len=len(tokens),
            page_hashes=tuple(map(hash_of, links)),
            max_new_tokens=max(ask.max_new_tokens - ask.num_said, 1),
            timeout_ns=Nanos(remaining_ns),
            room=ask.pair.room,
            peer=ask.pair.peer,
            dp_rank_hint=ask.pair.dp_rank_hint,
            priority=ask.priority,
            prompt_digest=digest_of(tokens, ask.sampling, limits),
            prompt_logprobs_from=ask.sampling.prompt_logprobs_from,
            rendered_at=ask.prompt.rendered_at,
            wants_vector=ask.params.vector is not None,
        ),
        Payload(
            request=request,
            tokens=array("i", tokens).tobytes(),
            sampling=ask.sampling,
            last_hash=links[-1] if links else root,
            vector=ask.params.vector,
            num_said=ask.num_said,
        ),
    )


def time_of(routing: Routing) -> int:
    """Unix seconds for whatever a chat template shows: of who routed the request, else of this server at this moment.

    Asked for once per request and server; `Routing.rendered_at` has the bounds.
    """
    return int(time.time()) if routing.rendered_at is None else routing.rendered_at


def check_timeout(seconds: float | None, milliseconds: str | None, default: float) -> int:
    """Nanoseconds from arrival until the first token at the latest. The body wins over the header."""
    param = "timeout"
    if seconds is None and milliseconds is not None:
        param = "X-Request-Timeout-Ms"
        try:
            seconds = float(milliseconds) / 1000
        except ValueError:
            raise invalid(param, f"{milliseconds!r} is not a number") from None
    seconds = default if seconds is None else seconds
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid(param, f"must be above 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds")
    return int(seconds * SECOND)


def check_rids(rid: str | list[str] | None, count: int, own_rid: str) -> list[str]:
    """One name per prompt: the client's or else `own_rid`, numbered when there are several prompts."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count:
            raise contradiction("rid", f"a list must hold one distinct name for each of the {count} prompts")
        rids = rid
    else:
        base = rid or own_rid
        rids = [base] if count == 1 else [f"{base}_{index}" for index in range(count)]
    if any(not 0 < len(name) <= MAX_RID_CHARS or not (name.isascii() and name.isprintable()) for name in rids):
        raise invalid("rid", f"must have 1 to {MAX_RID_CHARS} printable ASCII characters")
    return rids


def check_dp_ranks(routing: Routing, samples: Sequence[int]) -> list[int | None]:
    """Of this server, one per sample. One that is not there is refused where the other half of a pair is told so
    (`LiveRequests.submit`). The prefill's is a matter between the two nodes (`core/disagg/dp_rank.py`)."""
    found: list[int | None] = [None] * sum(samples)
    for param in ("data_parallel_rank", "routed_dp_rank"):
        for index, rank in enumerate(per_sample(getattr(routing, param), samples, param)):
            if rank is None:
                continue
            if found[index] not in (None, rank):
                raise contradiction(param, f"is {rank}, data_parallel_rank {found[index]}: leave one out")
            found[index] = rank
    return found


# pairing


def check_pairs(routing: Routing, samples: Sequence[int], limits: ModelLimits) -> list[PeerParams]:
    """One for every sample of every prompt; `samples` counts them per prompt.

    A list names one value per prompt or, as sglang-router writes it for a chat with n > 1, one per sample.
    Unified servers ignore the fields; a decode without a room computes the prompt.
    """
    if limits.role == "unified":
        return [PeerParams()] * sum(samples)
    hosts = per_sample(routing.bootstrap_host, samples, "bootstrap_host")
    ports = per_sample(routing.bootstrap_port, samples, "bootstrap_port")
    rooms = rooms_of(routing.bootstrap_room, samples)
    ranks = per_sample(routing.disagg_prefill_dp_rank, samples, "disagg_prefill_dp_rank")
    pairs: list[PeerParams] = []
    for host, port, room, rank in zip(hosts, ports, rooms, ranks, strict=True):
        address = None if host is None else check_address(host, port, limits)
        if room is None and limits.role == "prefill":
            raise invalid(
                "bootstrap_room",
                "a prefill server needs one; send requests to a unified server, or through a router that draws one, as "
                "SGLang's do, or that says kv_transfer_params on /v1/chat/completions or /v1/completions, as vLLM's do",
            )
        if room is None and limits.is_strict_remote:
            raise invalid(
                "bootstrap_room", "this decode computes no prompt itself (--strict-remote); send requests via a router"
            )
        if room is not None and address is None and limits.role == "decode":
            raise contradiction("bootstrap_host", "a room without the host of the prefill that holds it")
        is_paired = limits.role == "decode" and room is not None
        pairs.append(PeerParams(room, address if is_paired else None, rank))
    used = [pair.room for pair in pairs if pair.room is not None]
    if len(set(used)) != len(used):
        raise Refusal(
            Cause.DUPLICATE_ROOM, "bootstrap_room: two prompts of one request share a room", param="bootstrap_room"
        )
    return pairs


def per_sample(value: Any, samples: Sequence[int], param: str) -> list[Any]:
    """One value per sample from a scalar, a list of one per prompt, or a list of one per sample."""
    if isinstance(value, list) and len(value) == sum(samples):
        return value
    values = per_prompt(value, len(samples), param)
    return [value for value, count in zip(values, samples, strict=True) for _ in range(count)]


def rooms_of(value: int | str | list[int | str | None] | None, samples: Sequence[int]) -> list[Room | None]:
    """The room of every sample. One room for several prompts gives each its own, and so does a prompt's to samples."""
    if isinstance(value, list) and len(value) == sum(samples):
        return [check_room(room) for room in value]
    if isinstance(value, list):
        rooms = [check_room(room) for room in per_prompt(value, len(samples), "bootstrap_room")]
    else:
        room = check_room(value)
        indices = range(len(samples))
        rooms = [room and derived_room(room, index, purpose=b"prompt") for index in indices]
    return [
        room and derived_room(room, sample)
        for room, count in zip(rooms, samples, strict=True)
        for sample in range(count)
    ]


def check_room(value: int | str | None, param: str = "bootstrap_room") -> Room | None:
    if value is None:
        return None
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) <= 19 and value[0] != "0"):
            raise invalid(param, f"{value[:40]!r} is not a decimal integer")
        value = int(value)
    if not 0 < value <= MAX_ROOM:
        raise invalid(param, f"must lie between 1 and {MAX_ROOM}")
    return Room(value)


def check_port(value: int, param: str = "bootstrap_port") -> int:
    if not 0 < value <= MAX_PORT:
        raise invalid(param, f"must lie between 1 and {MAX_PORT}")
    return value


def check_address(host: str, port: int | None, limits: ModelLimits) -> Address:
    """Of a host that `AllowedHosts` has let pass."""
    return Address(without_brackets(host), limits.bootstrap_port if port is None else check_port(port))


# what both halves derive alike


def derived_room(room: Room, index: int, *, purpose: bytes = b"sample") -> Room:
    """The room of the index-th sample (or prompt); the 0th has the room itself."""
    return room if index == 0 else Room(hashed(purpose, room, index) or 1)


def sampling_bytes(sampling: SamplingParams) -> bytes:
    """Equal where the first token is. What is told of a token beside it may differ between the halves."""
    bias = dict(sorted(sampling.logit_bias.items()))
    told: dict[str, Any] = {"logprobs": False, "top_logprobs": 0, "prompt_top_logprobs": 0, "logprob_ids": ()}
    return msgspec.msgpack.encode(msgspec.structs.replace(sampling, logit_bias=bias, **told))


def digest_of(tokens: Sequence[int], sampling: SamplingParams, limits: ModelLimits) -> bytes:
    return prompt_digest(tokens, sampling_bytes(sampling), secret=limits.keys.digests)


def with_seed(params: GenerationParams, sample: int, room: Room | None) -> SamplingParams:
    """The user's seed for sample 0, others from it; without one, from the room, so that both halves draw alike."""
    if params.seed is not None:
        seed = params.seed % (1 << 63)
        seed = seed if sample == 0 else hashed(b"seed", seed, sample)
    elif room is not None:
        seed = hashed(b"seed", room, 0)
    else:
        seed = secrets.randbits(63)
    return msgspec.structs.replace(params.sampling, seed=seed)


def hashed(purpose: bytes, value: int, index: int) -> int:
    """63 bits."""
    digest = hashlib.sha256(b"tandem/%s/%d/%d" % (purpose, value, index)).digest()
    return int.from_bytes(digest[:8], "big") >> 1
