"""Where traces go, as `--enable-trace --otlp-traces-endpoint` say it, which are SGLang's flags.

    HOST:PORT, grpc://HOST:PORT       OTLP over gRPC, as SGLang's default `localhost:4317`
    http://HOST:PORT/v1/traces        OTLP over HTTP, protobuf; https:// too

`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` (`grpc` or `http/protobuf`) wins over the form of the endpoint.
"""

import os
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

DEFAULT_ENDPOINT = "localhost:4317"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SCHEMES = ("", "grpc", "http", "https")
MISSING = "--enable-trace needs OpenTelemetry: pip install 'tandem-llm[otel]'"
MALFORMED = "--otlp-traces-endpoint takes HOST:PORT for gRPC, or a URL such as http://HOST:4318/v1/traces"
UNUSED = "needs --enable-trace: nothing is traced"

Protocol = Literal["grpc", "http/protobuf"]


def protocol_of(endpoint: str) -> Protocol:
    match os.environ.get(PROTOCOL_VARIABLE, ""):
        case "grpc":
            return "grpc"
        case "http/protobuf":
            return "http/protobuf"
        case _:
            return "http/protobuf" if endpoint.lower().startswith(("http://", "https://")) else "grpc"


def is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        return parts.scheme in SCHEMES and bool(parts.hostname) and (bool(parts.scheme) or bool(parts.port))
    except ValueError:  # no port at all, or half an IPv6 address
        return False


def is_installed() -> bool:
    return all(find_spec(name) is not None for name in ("opentelemetry", "google")) and all(
        find_spec(name) is not None for name in ("opentelemetry.sdk", "opentelemetry.exporter", "google.protobuf")
    )
