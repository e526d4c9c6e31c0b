"""The page of the flags of a server, docs/flags.md, made from its configuration; `python -m tests.flags_page` refreshes
it.
"""

from pathlib import Path

from tandem.cli.flags import collected, kind_of
from tandem.config import flags
from tandem.environment import ENVIRONMENT, Variable
from tandem.flag_roles import ROLES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def flags_page() -> str:
    lines = [
        "# Flags of `tandem serve`",
        "",
        "Generated from `src/tandem/{door_config,config,flag_roles,environment}.py`. A flag that is not here does not",
        "exist; one that would do nothing on the server that is started is refused with the reason.",
        "",
        "| flag | default | servers | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in flags():
        kind = kind_of(field.name)
        choices = "{" + ",".join(field.metadata["choices"]) + "}" if field.metadata["choices"] else ""
        names = ", ".join(f"`{alias}`" for alias in field.metadata["aliases"])
        value = "" if kind is bool else f" {choices or field.metadata['metavar'] or kind.__name__.upper()}"
        value += " ..." if kind is tuple and "nargs" in collected(field) else ""
        default = "-" if field.default in (None, ()) else f"`{field.default}`"
        if field.default in (True, False) and kind is bool:
            default = "on" if field.default else "off"
        servers = ROLES.get(name, "all")
        meaning = field.metadata["help"] + (f"; also {names}" if names else "")
        off = f"`, `--no-{name[2:]}" if kind is bool and field.default is not False else ""
        lines.append(f"| `{name}{value.replace('|', ' or ')}{off}` | {default} | {servers} | {meaning} |")
    lines += [
        "",
        "## Environment",
        "",
        "`TANDEM_<name>`, or `SGLANG_<name>` where that is not set. Read at start; what is out of range is refused.",
        "",
        "| name | default | range | meaning |",
        "|---|---|---|---|",
        *map(environment_row, ENVIRONMENT),
    ]
    return "\n".join(lines) + "\n"


def environment_row(variable: Variable) -> str:
    span = f"{variable.least:g} to {variable.most:g}" if variable.most < 1e9 else f"{variable.least:g} or more"
    default = "off" if variable.is_switch else f"`{variable.default:g}`"
    return f"| `{variable.name}` | {default} | {'1, 0' if variable.is_switch else span} | {variable.text} |"


if __name__ == "__main__":
    PAGE.write_text(flags_page())
