"""What tests of refusals share: paths, a good request, and what is checked of each refusal."""

from typing import Any

import httpx

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def refused(
    http: httpx.Client,
    path: str,
    body: dict[str, Any] | bytes,
    code: str,
    param: str | None,
    status: int = 400,
) -> str:
    """Send, check the refusal and that the next request is answered; return the message."""
    if isinstance(body, bytes):
        headers = {"Content-Type": "application/json"}
        response = http.post(path, content=body, headers=headers)
    else:
        response = http.post(path, json=body)
    error = response.json()["error"]
    got = (response.status_code, error["type"], error["code"], error["param"])
    assert got == (status, "invalid_request_error", code, param), error
    assert response.headers["content-type"] == "application/json"
    after = http.post(CHAT, json={"messages": MESSAGES})
    # A broken template or engine of the test goes on refusing, but it answers.
    assert after.status_code < 500
    return str(error["message"])
