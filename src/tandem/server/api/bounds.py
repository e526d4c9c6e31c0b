"""The one table of bounds: what any field of any body may hold, how many of it, and how long.

The types stand in `body.py`, so a value is checked while it is decoded and the OpenAPI document shows the bound. A
field without one does not exist: a test walks all bodies. What a type cannot say (token ids of this model, the room
in its context, fields that need one another) is checked in `ask.py`, before anything is reserved.

Why every integer has one: MessagePack carries 64 bits. A larger number would be met only when a request is already on
its way to the node.
"""

from typing import Annotated

from msgspec import Meta

from tandem.core.settings import MAX_DP_SIZE

MAX_BODY_BYTES = 32 << 20
MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1
MAX_ROOM = MAX_INT
MAX_PORT = (1 << 16) - 1

# of one request
MAX_PROMPTS = 1024
MAX_N = 128
MAX_SUBMITTED_TOKENS = 8 << 20  # prompt tokens of all samples together: they go to the node in one message
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0
MAX_MESSAGES = 1 << 14
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024

# of /tokenize and /detokenize, all texts or lists together
MAX_TEXT_CHARS = 4 << 20
MAX_DETOKENIZED = 1 << 18

Int = Annotated[int, Meta(ge=MIN_INT, le=MAX_INT)]
Samples = Annotated[int, Meta(ge=1, le=MAX_N)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_INT)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]  # -1 and 0: all tokens
Rank = Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # int32 on its way to the worker

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
