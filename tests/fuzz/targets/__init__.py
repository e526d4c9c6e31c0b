"""All targets by name. One module per door, and one row per target."""

from engine import Target

from targets import (
    answers,
    bootstrap,
    clients,
    control,
    data_plane,
    flight,
    frames,
    http_router,
    http_server,
    messages,
    model_files,
    page_files,
)

MODULES = (
    frames,
    answers,
    control,
    messages,
    data_plane,
    bootstrap,
    http_server,
    http_router,
    clients,
    model_files,
    page_files,
    flight,
)
TARGETS: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
