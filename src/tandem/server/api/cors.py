"""What a browser is told of web pages of other origins (`--allowed-origins`): nothing, unless it is asked for.

It stands before the door that checks keys, since a browser sends no key with the question whether it may send one, and
since a page has to be able to read why it was refused. What such a page may then do is in `access.py`.
"""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tandem.server.exposure import Reachable

# Of an answer, beside those that any page may read.
SHOWN_HEADERS = ("x-request-id", "request-id", "x-tandem-path", "retry-after")


def cors(config: Reachable) -> list[Middleware]:
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_credentials=config.allow_credentials,
            allow_methods=config.allowed_methods or ("*",),
            allow_headers=config.allowed_headers or ("*",),
            expose_headers=SHOWN_HEADERS,
        )
    ]
