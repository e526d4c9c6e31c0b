"""HTTP requests and answers of one port, by endpoint, method and status: under way and so far."""

from dataclasses import dataclass, field

OTHER = "other"  # whatever is not an endpoint: what clients make up must not become labels
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"})
Asked = tuple[str, str]  # endpoint, method
Answered = tuple[str, str, str]  # and the status


@dataclass(slots=True)
class HttpCounts:
    endpoints: frozenset[str] = frozenset()
    requests: dict[Asked, int] = field(default_factory=dict)
    responses: dict[Answered, int] = field(default_factory=dict)
    active: dict[Asked, int] = field(default_factory=dict)

    def begin(self, path: str, method: str) -> Asked:
        asked = (path if path in self.endpoints else OTHER, method if method in METHODS else OTHER)
        self.requests[asked] = self.requests.get(asked, 0) + 1
        self.active[asked] = self.active.get(asked, 0) + 1
        return asked

    def end(self, asked: Asked, status: int) -> None:
        self.active[asked] -= 1
        answered = (*asked, str(status))
        self.responses[answered] = self.responses.get(answered, 0) + 1
