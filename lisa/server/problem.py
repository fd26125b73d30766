"""What a client is told when a request fails, in the words of either API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lisa.errors import Busy, Closed, ContextFull, LisaError, MemoryFull, NoTemplate, TooSlow, UsageError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Problem(Exception):
    """An HTTP status, a line for a person, and where one exists the field and a code for a program."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "api_error")

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


def shutdown() -> Problem:
    return Problem(503, "the server is shutting down", code="shutting_down")


def problem(error: BaseException) -> Problem:
    """Any error as what its client may know: a LisaError's own line, nothing of a bug's inside."""
    if isinstance(error, Problem):
        return error
    for kind, status, code in (
        (ContextFull, 400, "context_length_exceeded"),
        (UsageError, 400, None),
        (NoTemplate, 400, "no_chat_template"),
        (Busy, 503, "busy"),
        (MemoryFull, 503, "memory_full"),
        (TooSlow, 408, "reader_too_slow"),
        (Closed, 503, "not_running"),
        (LisaError, 500, None),
    ):
        if isinstance(error, kind):
            return Problem(status, str(error), code=code)
    return Problem(500, "something went wrong inside the server; its log says what")
