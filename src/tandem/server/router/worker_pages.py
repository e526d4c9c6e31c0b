"""Workers that come and go while the router runs: the pages for operators, with the names of sglang-router.

    POST   /workers         {"url", "worker_type": prefill or decode, "bootstrap_port"}: 202, and it joins by its probes
    GET    /workers(/ID)    who is known, and how they are
    DELETE /workers/ID      202: it gets no more requests, and is gone when it has answered those that it has

    POST /add_worker?url=&worker_type=&bootstrap_port=, POST /remove_worker?url=, GET /list_workers: the older names

Who may ask is in `access.py`: whoever adds a worker is sent prompts.
"""

from typing import Any  # JSON documents

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.core.router.router import Router
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import Role
from tandem.server.api.endpoint_parts import read_body
from tandem.server.api.errors import Problem, Refusal, invalid
from tandem.server.api.large_body import decode_anywhere
from tandem.server.router.config import make_worker
from tandem.server.router.shell import RouterShell
from tandem.server.router.worker_documents import STAGE

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
MAX_WORKERS = 1024
MAX_URL_CHARS = 2048


class NewWorker(Struct):
    """Other fields of sglang-router's are ignored, as it ignores them itself in this mode."""

    url: str
    worker_type: str
    bootstrap_port: int | None = None


class WorkerPages:
    def __init__(self, router: Router, shell: RouterShell) -> None:
        self._router = router
        self._shell = shell

    def routes(self) -> list[Route]:
        return [
            Route("/workers", self._add, methods=["POST"]),
            Route("/workers", self._list, methods=["GET"]),
            Route("/workers/{id}", self._show, methods=["GET"]),
            Route("/workers/{id}", self._remove, methods=["DELETE"]),
            Route("/add_worker", self._add_by_url, methods=["POST"]),
            Route("/remove_worker", self._remove_by_url, methods=["POST"]),
            Route("/list_workers", self._list_urls, methods=["GET"]),
        ]

    # --- orders ---------------------------------------------------------------------------------------------------

    async def _add(self, request: Request) -> Response:
        return self._added(await decode_anywhere(await read_body(request), NewWorker))

    async def _add_by_url(self, request: Request) -> Response:
        given: dict[str, Any] = {"worker_type": "", **request.query_params}
        try:
            told = msgspec.convert(given, NewWorker, strict=False)
        except msgspec.ValidationError as error:
            raise invalid("url", str(error)) from None
        return self._added(told)

    def _added(self, told: NewWorker) -> Response:
        new = self._checked(told)
        known = next((worker for worker in self._staying() if worker.url == new.url), None)
        if known is None:
            if len(self._router.registry.workers()) >= MAX_WORKERS:
                raise invalid("url", f"there are {MAX_WORKERS} workers, which is as many as there may be")
            self._shell.add_worker(new)
        elif known.role is not new.role or new.bootstrap_port not in (None, known.bootstrap_port):
            raise invalid("url", f"it is known as {known.role.value} with bootstrap port {known.bootstrap_port}")
        worker = known or new
        body = {
            **accepted(worker, "the worker is known" if known else "the worker joins with its first good health check"),
            "url": worker.url,
            "location": f"/workers/{worker.id}",
        }
        return JSONResponse(body, 202, {"location": f"/workers/{worker.id}"})

    def _checked(self, told: NewWorker) -> RegisteredWorker:
        """Raises `Refusal`."""
        role, port = ROLES.get(told.worker_type), told.bootstrap_port
        if role is None:
            raise invalid("worker_type", f"must be one of {', '.join(ROLES)}")
        if port is not None and (role is Role.DECODE or not 0 < port < 1 << 16):
            raise invalid("bootstrap_port", "must be a port, and of a prefill")
        if len(told.url) > MAX_URL_CHARS:
            raise invalid("url", "is too long")
        try:
            return make_worker(self._router.registry.next_id, role, told.url, port)
        except ValueError as error:
            raise invalid("url", str(error)) from None

    async def _remove(self, request: Request) -> Response:
        return self._removed(self._named(request))

    async def _remove_by_url(self, request: Request) -> Response:
        given = request.query_params.get("url", "")
        try:
            url = make_worker(self._router.registry.next_id, Role.DECODE, given).url
        except ValueError:
            raise unknown(given) from None
        worker = next((worker for worker in self._staying() if worker.url == url), None)
        if worker is None:
            raise unknown(given)
        return self._removed(worker)

    def _removed(self, worker: RegisteredWorker) -> Response:
        self._shell.remove_worker(worker)
        return JSONResponse(accepted(worker, "the worker leaves when it has answered what it has"), 202)

    # --- questions ------------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        workers = self._router.registry.workers()
        counts = {f"{name}_count": sum(worker.role is role for worker in workers) for name, role in ROLES.items()}
        body = {
            "workers": [self._described(worker) for worker in workers],
            "total": len(workers),
            "stats": {**counts, "regular_count": 0},
        }
        return JSONResponse(body)

    async def _list_urls(self, request: Request) -> Response:
        return JSONResponse({"urls": [worker.url for worker in self._staying()]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._described(self._named(request)))

    def _described(self, worker: RegisteredWorker) -> dict[str, Any]:
        breaker, models = self._router.registry.breaker(worker.id), self._router.registry.models(worker.id)
        return {
            "id": str(worker.id),
            "url": worker.url,
            "model_id": (models or ("unknown",))[0],
            "models": models,
            "worker_type": worker.role.value,
            "bootstrap_port": worker.bootstrap_port,
            "is_healthy": self._router.is_live(worker.id),
            "health": self._router.registry.health(worker.id),
            "is_leaving": worker.id in self._router.registry.leaving(),
            "load": self._router.load(worker.id),
            "circuit_breaker": "off" if breaker is None else breaker.state,
            "connection_mode": "HTTP",
        }

    def _named(self, request: Request) -> RegisteredWorker:
        name = request.path_params["id"]
        worker = next((worker for worker in self._router.registry.workers() if str(worker.id) == name), None)
        if worker is None:
            raise unknown(name)
        return worker

    def _staying(self) -> list[RegisteredWorker]:
        leaving = self._router.registry.leaving()
        return [worker for worker in self._router.registry.workers() if worker.id not in leaving]


def accepted(worker: RegisteredWorker, message: str) -> dict[str, Any]:
    return {"status": "accepted", "worker_id": str(worker.id), "message": message}


def unknown(name: str) -> Refusal:
    return Refusal(Problem.NOT_FOUND, f"there is no worker {name[:80]!r}", stage=STAGE)
