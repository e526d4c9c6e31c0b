"""From the fields of `ServerConfig` to command-line flags, and to the page that documents them."""

import argparse
from types import UnionType
from typing import Any, get_args, get_type_hints  # Any: a flag's type, default and value are whatever its field says

from tandem.cli.failure import CommandFailed
from tandem.config import FORCED_RETRIES, ServerConfig, environment_number, flags, violations


def add_flags(parser: argparse.ArgumentParser) -> None:
    for name, field in flags():
        kind = kind_of(field.name)
        options: dict[str, Any] = {"default": field.default, "help": help_text(field)}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            options["type"] = kind
            options["metavar"] = field.metadata["metavar"] or None
        if field.metadata["choices"]:
            options["choices"] = field.metadata["choices"]
        parser.add_argument(name, **options)


def config_of(args: argparse.Namespace) -> ServerConfig:
    """Raises CommandFailed with every rule that the combination breaks."""
    config = ServerConfig(model=args.model, **{field.name: getattr(args, field.name) for _, field in flags()})
    try:
        environment_number(FORCED_RETRIES)
    except ValueError as error:
        raise CommandFailed(str(error), is_wrong_usage=True) from error
    if broken := violations(config):
        raise CommandFailed("; ".join(broken), is_wrong_usage=True)
    return config


def kind_of(name: str) -> type:
    """`int | None` is an int that may be left out."""
    kind = get_type_hints(ServerConfig)[name]
    if isinstance(kind, UnionType):
        (kind,) = [part for part in get_args(kind) if part is not type(None)]
    return kind


def help_text(field: Any) -> str:
    text: str = field.metadata["help"].replace("%", "%%")
    return text if field.default in (None, False) else f"{text} (default: {field.default})"


def flags_page() -> str:
    """`docs/flags.md`."""
    lines = [
        "# Flags of `tandem serve`",
        "",
        "Generated from `src/tandem/config.py`. A flag that is not here does not exist.",
        "",
        "| flag | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in flags():
        kind = kind_of(field.name)
        choices = "{" + ",".join(field.metadata["choices"]) + "}" if field.metadata["choices"] else ""
        value = "" if kind is bool else f" {choices or field.metadata['metavar'] or kind.__name__.upper()}"
        default = "-" if field.default is None else "off" if field.default is False else f"`{field.default}`"
        lines.append(f"| `{name}{value.replace('|', ' ')}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"
