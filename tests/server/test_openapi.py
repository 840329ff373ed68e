"""The OpenAPI document, and requests made from it: none may be answered by a 5xx."""

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.openapi import document
from tests.server.fakes import FakeEngine, Live

OPERATIONS = [
    (path, method.upper()) for path, item in document()["paths"].items() for method in item
]


def test_the_document_is_served(http: httpx.Client) -> None:
    served = http.get("/openapi.json").json()
    assert served == document()
    assert set(served["paths"]) >= {"/v1/chat/completions", "/v1/responses", "/v1/completions"}
    for path, method in OPERATIONS:
        if method == "GET":
            assert http.get(path).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_5xx(server: Live[FakeEngine], path: str, method: str) -> None:
    # Here, since it takes seconds to import.
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(document())

    @settings(
        max_examples=40 if method == "POST" else 5,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy())
    def run(case: Any) -> None:
        response = case.call(base_url=server.url)
        assert response.status_code < 500, response.text
        statuses.add(response.status_code)

    statuses: set[int] = set()
    run()
    assert 200 in statuses
