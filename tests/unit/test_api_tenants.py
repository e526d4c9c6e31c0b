"""Who may find whose prompt in the cache, and what hashes and digests tell those who read them."""

import hashlib
from array import array
from itertools import product

import msgspec
import pytest
from api_fakes import World, ids, prompt_of, world
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tandem.config import ServerConfig
from tandem.core.disagg.messages import Message
from tandem.core.request import Request
from tandem.pagehash import HASH_BYTES, hash_of, page_link, prompt_digest, prompt_hashes, prompt_links, root_hash
from tandem.server.api.model_facts import ModelFacts, limits_of
from tandem.server.api.tenant import given_key, tenant_of

PROMPT = "0123456789abcdef"
PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 5}


def requests_of(w: World, *asked: tuple[str | None, str | None], **more: object) -> list[Request]:
    """One request per (key, salt)."""
    before = len(w.node.submits)
    with w.http() as http:
        for key, salt in asked:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            body = {"prompt": PROMPT, "cache_salt": salt} | more
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    return [submit.request for submit in w.node.submits[before:]]


def test_prompts_of_different_keys_share_no_page_and_those_of_one_key_do() -> None:
    w = world(page_size=4)
    one, again, other, nobody = requests_of(w, ("key-a", None), ("key-a", None), ("key-b", None), (None, None))
    assert one.page_hashes == again.page_hashes
    assert len({one.page_hashes[0], other.page_hashes[0], nobody.page_hashes[0]}) == 3
    assert not set(one.page_hashes) & set(other.page_hashes)


def test_a_salt_narrows_a_key_and_never_reaches_another() -> None:
    w = world(page_size=4)
    parts = ("", "a", "b", "ab", "/", "a/", "/a", "a/b", "\0", "a\0", hashlib.sha256(b"tandem/tenant\0a").hexdigest())
    keys = [key for key in parts if key.isprintable() and key]
    asked = [(key, salt) for key, salt in product((None, *keys), parts)]
    found = [request.page_hashes[0] for request in requests_of(w, *asked)]
    assert len(set(found)) == len(asked)


NAMES = st.tuples(st.text(), st.text(), st.text())


@given(NAMES, NAMES)
def test_no_two_keys_salts_and_extra_keys_have_one_name(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (tenant_of(*one) == tenant_of(*other)) is (one == other)


def test_sglangs_extra_key_parts_prompts_as_a_salt_does() -> None:
    w = world(page_size=4)
    (plain,) = requests_of(w, ("key", None))
    (one,) = requests_of(w, ("key", None), extra_key="a")
    (again,) = requests_of(w, ("key", None), extra_key="a")
    (salted,) = requests_of(w, ("key", "a"), extra_key="a")
    (empty,) = requests_of(w, ("key", None), extra_key="")
    assert one.page_hashes == again.page_hashes
    assert empty.page_hashes == plain.page_hashes
    assert len({request.page_hashes[0] for request in (plain, one, salted)}) == 3
    assert tenant_of("key", "ab", "c") != tenant_of("key", "a", "bc")


def test_without_a_salt_and_with_an_empty_one_it_is_the_same_tenant() -> None:
    w = world(page_size=4)
    without, empty = requests_of(w, ("key", None), ("key", ""))
    assert without.page_hashes == empty.page_hashes


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, ""),
        ("", ""),
        ("Bearer k", "k"),
        ("bearer  k ", "k"),
        ("BEARER k", "k"),
        ("Bearer", ""),
        ("Basic k", ""),
        ("k", ""),
        ("Bearer a b", "a b"),
    ],
)
def test_the_key_is_what_the_bearer_header_says(header: str | None, key: str) -> None:
    assert given_key(Headers({} if header is None else {"authorization": header})) == key


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_halves_of_a_pair_have_tenants_of_their_own_secret(role: str) -> None:
    """Page hashes never travel, so nothing needs them to agree; the digest of the prompt does."""
    first, second = (
        requests_of(world(page_size=4, disaggregation_mode=role, digest_secret=b"s" * 32), ("key", "salt"), **PAIR)[0]
        for _ in range(2)
    )
    assert not set(first.page_hashes) & set(second.page_hashes)
    assert first.prompt_digest == second.prompt_digest


def test_no_message_between_servers_has_a_page_hash() -> None:
    schema = msgspec.json.encode(msgspec.json.schema(Message))
    for word in (b"page_hash", b"last_hash", b"tenant"):
        assert word not in schema


# what hashes tell


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_page_hashes_are_keyed_anew_in_every_process(role: str) -> None:
    first, second = (requests_of(world(page_size=4, disaggregation_mode=role), (None, None), **PAIR) for _ in range(2))
    assert not set(first[0].page_hashes) & set(second[0].page_hashes)


def test_whoever_knows_the_hashes_of_a_prompt_cannot_try_out_how_it_goes_on() -> None:
    """All that the core and its records see, and the code of this repository, do not give the hash of a known page."""
    w = world(page_size=4)
    (request,) = requests_of(w, (None, None))
    tokens = ids(PROMPT)
    known = [b"", b"tandem", *request.page_hashes, request.prompt_digest]
    for parent in known:
        tried = [hash_of(page_link(parent, tokens[start : start + 4])) for start in range(0, 16, 4)]
        tried += prompt_hashes(root_hash(secret=parent, tenant=tenant_of("", None)), tokens, page_size=4)
        tried += [hashlib.sha256(parent + array("i", tokens[:4]).tobytes()).digest()[:HASH_BYTES]]
        assert not set(tried) & set(request.page_hashes)


def test_the_worker_goes_on_with_the_chain_of_the_prompt() -> None:
    w = world(page_size=4)
    (request,) = requests_of(w, (None, None))
    (submit,) = w.node.submits
    assert hash_of(submit.payload.last_hash) == request.page_hashes[-1]
    assert submit.payload.last_hash not in (request.page_hashes[-1], *request.page_hashes)
    assert len(request.page_hashes) == len(prompt_of(submit)) // 4


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8))
def test_links_of_a_prompt_are_those_of_its_pages_one_by_one(tokens: list[int], page_size: int) -> None:
    root = root_hash(secret=b"s", tenant="t")
    links = prompt_links(root, tokens, page_size=page_size)
    assert len(links) == len(tokens) // page_size
    for index, (parent, link) in enumerate(zip([root, *links], links, strict=False)):
        assert link == page_link(parent, tokens[index * page_size : (index + 1) * page_size])
    assert prompt_hashes(root, tokens, page_size=page_size) == [link[:HASH_BYTES] for link in links]


# the digest of the prompt


def test_a_unified_server_keys_prompt_digests_with_a_secret_of_its_own() -> None:
    first, second = (requests_of(world(), (None, None), seed=1)[0] for _ in range(2))
    assert first.prompt_digest != second.prompt_digest
    tokens = ids(PROMPT)
    for secret in (b"", b"tandem"):
        assert first.prompt_digest != prompt_digest(tokens, secret=secret)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_two_halves_with_the_same_secret_agree_on_a_prompt_and_others_do_not(role: str) -> None:
    digests = []
    for secret in (b"cluster", b"cluster", b"another", None):
        w = world(disaggregation_mode=role, digest_secret=secret)
        digests.append(requests_of(w, (None, None), **PAIR)[0].prompt_digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_no_secret_is_shown() -> None:
    model = ModelFacts("m", [], "t", 10, 4, 10, frozenset(), "float32")
    limits = limits_of(ServerConfig(model="m", disaggregation_mode="decode"), model, digest_secret=b"cluster secret")
    assert limits.keys.digests == b"cluster secret"
    assert repr(limits.keys.pages) not in repr(limits)
    assert "cluster secret" not in repr(limits)
