"""The time that a chat template may ask for: one per request, the same on whatever server renders it.

Both halves of a disaggregated request render its prompt, so nothing in it may come from the server: not its clock, not
its time zone, not its locale. `RenderTime` is the `strftime_now` of one rendering. It shows Unix seconds that came with
the request, or that the server took when the request arrived, and it shows them in UTC.
"""

import datetime
import re

EPOCH_SECONDS = re.compile(r"%(%|[-_0^#]*\d*[EO]?s)")


class RenderTime:
    """Called by a template as `strftime_now(format)`. Names of days and months are English: nobody sets a locale."""

    __slots__ = ("_seconds", "shown")

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self.shown = 0  # for `Request.rendered_at`: the time, once it was asked for

    def __call__(self, format: str) -> str:
        self.shown = self._seconds
        # `%s` is the one directive for which strftime looks at the time zone of the process.
        format = EPOCH_SECONDS.sub(lambda found: "%%" if found[1] == "%" else str(self._seconds), format)
        return datetime.datetime.fromtimestamp(self._seconds, datetime.UTC).strftime(format)
