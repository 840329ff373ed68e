"""The company check end to end on a tiny model, and its judgement of differences."""

import json

import numpy as np
import pytest

from grout import EngineConfig, create_engine
from scripts import check_company

ARGS = ["tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--requests", "5", "--new", "7"]


def test_nothing_differs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_company.main([*ARGS, "--longest", "80"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["requests"], result["equal"]) == (5, 5)
    assert (result["near_ties"], result["wrong"], result["differences"]) == (0, 0, [])


def test_another_token_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = check_company.together

    def disturbed(*args: object) -> list[check_company.Ids]:
        replies = run(*args)  # type: ignore[arg-type]
        if len(replies) > 1:
            replies[2][4] += 1
        return replies

    monkeypatch.setattr(check_company, "together", disturbed)
    assert check_company.main(ARGS) == 1
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert (result["equal"], result["wrong"]) == (4, 1)
    [difference] = result["differences"]
    assert (difference["request"], difference["token"]) == (2, 4)
    assert difference["gap_ulps"] > check_company.TIE_ULPS
    assert out[-2].startswith("request 2: token 4, ")


def test_the_gap_is_that_of_the_first_difference() -> None:
    config = EngineConfig(
        model="tiny-qwen3", load_format="dummy", device="cpu", max_num_seqs=1, max_model_len=64
    )
    prompt = np.arange(1, 6, dtype=np.int32)
    with create_engine(config) as engine:
        [reply] = check_company.together(engine, [prompt], 4)
        logits = check_company.our_logits(engine.runner.transformer, prompt, reply)[2]
        second = int(np.argsort(logits)[-2])
        other = np.array([*reply[:2], second, 0], np.int32)
        at, ulps = check_company.gap(engine, prompt, reply, other)
    assert at == 2
    top = float(logits.max())
    assert top == logits[reply[2]]
    ulp = 2.0**-7 * 2.0 ** np.floor(np.log2(np.abs(logits).max()))
    assert ulps == pytest.approx((top - logits[second]) / ulp)
