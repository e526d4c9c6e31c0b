"""The one table of bounds: what any field of any body may hold, how many of it, and how long.

The types stand in `body.py`, so a value is checked while it is decoded and the OpenAPI document shows the bound. A
field without one does not exist: a test walks all bodies. What a type cannot say (token ids of this model, the room
in its context, fields that need one another) is checked in `validation.py` and `sample_requests.py`, before anything is
reserved.

Why every integer has one: MessagePack carries 64 bits. A larger number would be met only when a request is already on
its way to the node.
"""

from typing import Annotated

from msgspec import Meta

from tandem.core.settings import MAX_DP_SIZE
from tandem.core.values import MAX_TIMEOUT_SECONDS

MAX_BODY_BYTES = 32 << 20
MAX_CONTAINERS = 1 << 16  # objects and arrays of one body, at any depth
MAX_VALUES = 1 << 20  # of one body
MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1
MAX_ROOM = MAX_INT
MAX_PORT = (1 << 16) - 1

# of one request
MAX_PROMPTS = 1024
MAX_N = 128
MAX_SAMPLES = 1024  # of all prompts: each is a request of its own to the scheduler
MAX_SUBMITTED_TOKENS = 8 << 20  # prompt tokens of all samples together: they go to the node in one message
MAX_PROMPT_SCORES = 1 << 20  # prompt tokens with log-probabilities, and alternatives, of all samples together
SCORE_BYTES, ALTERNATIVE_BYTES = 16, 14  # of one of them at most, on the way from prefill to decode
MAX_MESSAGES = 1 << 14
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_GRAMMAR_CHARS = 1 << 16  # of one schema, expression or grammar as text
MAX_CHOICES = 1024
MAX_TOOLS = 128
MAX_RESPONSE_ID_CHARS = 256
MAX_DIMENSIONS = 1 << 20  # of any model
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512

# of /tokenize and /detokenize, all texts or lists together
MAX_TEXT_CHARS = 1 << 20
MAX_DETOKENIZED = 1 << 18

# of what one turn of the event loop does itself, about 2 ms on a slow core; more goes to a thread (`off_loop.py`)
LOOP_BYTES = 1 << 15  # of JSON that becomes values, or the other way round
LOOP_CHAT_BYTES = 1 << 13  # of a body whose conversation becomes text: a template runs some lines for each message
LOOP_CHARS = 1 << 12  # of texts that become tokens
LOOP_IDS = 1 << 12  # tokens that become page hashes, or text
LOOP_SCORES = 1 << 10  # tokens with their logprobs, and alternatives, in one answer
SCORE_VECTOR_BYTES = 1 << 5  # of a vector, that are as much work as one of them
LOOP_SAMPLES = 1 << 6  # prompts or samples, however short

Int = Annotated[int, Meta(ge=MIN_INT, le=MAX_INT)]
Samples = Annotated[int, Meta(ge=1, le=MAX_N)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokensOrNone = Annotated[int, Meta(ge=0, le=MAX_INT)]  # 0: only what is said of the prompt
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]  # -1 and 0: all tokens
Dimensions = Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)]
TopN = Annotated[int, Meta(ge=1, le=MAX_INT)]  # of documents; there may be fewer
Rank = Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # int32 on its way to the worker
LogprobIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)]

Seconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIAS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
ResponseId = Annotated[str, Meta(max_length=MAX_RESPONSE_ID_CHARS)]
ClientText = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARS)], ClientText],
    Meta(max_length=MAX_METADATA),
]
Choice = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Choice], Meta(max_length=MAX_CHOICES)]
