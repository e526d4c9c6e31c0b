"""The page of the errors of servers and routers, docs/errors.md, made from their table; `python -m tests.errors_page`
refreshes it.
"""

from pathlib import Path

from tandem.server.api.errors import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"


def errors_page() -> str:
    rows = [
        f"| `{code.value}` | {rule.status} | {'yes' if rule.retryable else 'no'} | {rule.said_by} | {rule.remedy} |"
        for code, rule in RULES.items()
    ]
    return "\n".join(
        [
            "# Errors",
            "",
            "Every request ends with its tokens or with one of these codes, in `error.code` of the body. Before the",
            "first token the HTTP status is the one below; later the stream ends with a last event that holds the",
            "same object. `stage` is the wait the request was in, `edge` or `router` when it never reached a node;",
            "`waited_seconds` is the time it spent in that wait, `peer` the server with its other half, if known.",
            "",
            "```json",
            '{"type": "error",',
            ' "error": {"message": "...", "type": "...", "param": null, "code": "...", "retryable": true,',
            '           "stage": "...", "waited_seconds": 0.0, "peer": null, "remedy": "...", "request_id": "..."}}',
            "```",
            "",
            "| code | status | retryable | who says it | what to do |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "This page is generated from `src/tandem/server/api/errors.py`.",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(errors_page())
