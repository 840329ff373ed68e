"""The serving benchmark: its client, its arithmetic, and whole runs on known servers."""

import asyncio
import contextlib
import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import bench_serving, serving_plot, serving_report
from scripts.serving_client import Client, Endpoint, Reply, ask
from scripts.serving_prompts import Prompts
from server.settings import Settings
from tests.server.fakes import MODEL, live

FEW = ["--new", "5", "--prompt", "6", "--vocab", "1001", "--num-prompts", "3", "--warmup", "1"]
USAGE = '{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2,"total_tokens":6}}'


def token(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


GOOD = [token("a"), token("b", "length"), USAGE, "[DONE]"]


def sse(events: list[str]) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode()


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def http(body: bytes, status: str = "200 OK", chunk: int = 1 << 20) -> bytes:
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + chunked(body, chunk)


def reply_to(answer: bytes, step: int = 1 << 20, requests: int = 1) -> list[Reply]:
    """What the client makes of `answer`, written `step` bytes at a time."""
    served: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        while True:
            try:
                head = await reader.read(1 << 16)
            except ConnectionError:
                break
            if not head:
                break
            for i in range(0, len(answer), step):
                writer.write(answer[i : i + step])
                await writer.drain()
                await asyncio.sleep(0)
            if not answer.endswith(b"0\r\n\r\n"):
                break
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def main() -> list[Reply]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(Endpoint("test", f"http://127.0.0.1:{port}"), timeout=60)
        try:
            return [await ask(client, "/v1/completions", {}) for _ in range(requests)]
        finally:
            await client.close()
            server.close()
            await asyncio.gather(*filter(None, served))

    return asyncio.run(main())


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_answers_arrive_in_any_pieces(step: int, chunk: int) -> None:
    (reply,) = reply_to(http(sse(GOOD), chunk=chunk), step)
    assert reply.problem(2) is None
    assert (reply.text, reply.finish_reason) == ("ab", "length")
    assert (reply.prompt_tokens, reply.completion_tokens, len(reply.arrivals)) == (4, 2, 2)
    assert reply.start < reply.arrivals[0] <= reply.arrivals[1] == reply.end


def test_connections_are_used_again() -> None:
    replies = reply_to(http(sse(GOOD)), requests=3)
    assert [reply.problem(2) for reply in replies] == [None] * 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (http(b'{"error":{"message":"too busy"}}', "429 Busy"), "HTTP 429: too busy"),
        (http(b"oops", "500 Error"), "HTTP 500: oops"),
        (http(sse(['{"error":{"message":"broke"}}', "[DONE]"])), "error event: broke"),
        (http(sse(['{"error":"overloaded"}', "[DONE]"])), "error event: overloaded"),
        (http(sse(["[1]"])), "no JSON object: b'[1]'"),
        (http(sse(['"x"'])), "no JSON object"),
        (http(sse(['{"choices":[3]}'])), "AttributeError"),
        (http(sse(['{"choices":[{"delta":"x"}]}'])), "AttributeError"),
        (http(sse(['{"choices":[{"delta":{"tool_calls":["x"]}}]}'])), "AttributeError"),
        (http(sse(['{"usage":[1],"choices":[]}'])), "TypeError"),
        (http(sse(GOOD[:-1])), "the stream ended without [DONE]"),
        (http(sse([*GOOD[:2], "[DONE]"])), "no usage"),
        (http(sse([token("a"), USAGE, "[DONE]"])), "no finish_reason"),
        (http(sse([token("a")] * 2 + GOOD)), "4 chunks of tokens came, usage says 2"),
        (http(sse(["nonsense"])), "JSONDecodeError"),
        (http(sse(GOOD))[:-30], "closed the connection"),
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP/1.1 answer"),
    ],
)
def test_what_goes_wrong_is_named(answer: bytes, problem: str) -> None:
    (reply,) = reply_to(answer)
    assert problem in (reply.problem(2) or "")


def test_what_is_null_is_not_there() -> None:
    events = [
        '{"error":null,"choices":null,"usage":null}',
        '{"error":null,"choices":[{"delta":null,"finish_reason":null}]}',
        '{"choices":[{"delta":{"content":null,"tool_calls":[{"function":null}]}}]}',
        '{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}',
        '{"choices":[{"text":null,"finish_reason":null}]}',
    ]
    (reply,) = reply_to(http(sse([*events, USAGE.replace("2,", "4,"), "[DONE]"])))
    assert (reply.error, reply.text, reply.finish_reason) == (None, "a", "stop")


def test_a_short_answer_is_a_failure() -> None:
    (reply,) = reply_to(http(sse(GOOD)))
    assert reply.problem(3) == "usage says 2 tokens, 3 were asked for"


def test_chat_chunks_without_tokens_are_not_tokens() -> None:
    deltas: list[tuple[dict[str, Any], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"reasoning_content": "m", "reasoning": "m"}, None),
        ({"content": ""}, None),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, None),
        ({}, "stop"),
    ]
    events = [json.dumps({"choices": [{"delta": d, "finish_reason": r}]}) for d, r in deltas]
    (reply,) = reply_to(http(sse([*events, USAGE.replace("2,", "3,"), "[DONE]"])))
    assert reply.problem(3) is None
    assert (reply.text, len(reply.arrivals), reply.finish_reason) == ("m{}", 3, "stop")


def answered(start: float, arrivals: list[float], tokens: int) -> Reply:
    return Reply(
        start=start, end=arrivals[-1], arrivals=arrivals, text="x", finish_reason="length",
        prompt_tokens=10, completion_tokens=tokens, status=200, done=True, usage_seen=True,
    )  # fmt: skip


def test_figures_are_those_of_vllm() -> None:
    replies = [
        answered(0.0, [0.1, 0.2, 0.4], 3),
        answered(1.0, [1.3, 1.5], 3),
        answered(0.0, [1.0, 9.0], 2),
        Reply(start=0.0, end=0.5, error="HTTP 500: oops"),
    ]
    run = serving_report.summarise(replies, 2.0, 3)
    assert (run["completed"], run["failed"]) == (2, 2)
    assert run["errors"] == {
        "usage says 2 tokens, 3 were asked for": 1,
        "HTTP 500: oops": 1,
    }
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (20, 6)
    assert (run["output_throughput"], run["request_throughput"]) == (3.0, 1.0)
    assert run["total_token_throughput"] == 13.0
    assert (run["mean_ttft_ms"], run["median_ttft_ms"]) == (200.0, 200.0)
    assert run["p99_ttft_ms"] == pytest.approx(298.0)
    assert run["mean_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert run["mean_itl_ms"] == pytest.approx((100 + 200 + 200) / 3, abs=1e-3)
    assert run["median_itl_ms"] == 200.0
    assert run["mean_e2el_ms"] == 450.0
    assert run["tokens_per_chunk"] == 1.2


def test_nothing_measured_is_null_not_zero() -> None:
    run = serving_report.summarise([Reply(error="x")], 1.0, 3)
    assert (run["mean_ttft_ms"], run["p99_itl_ms"], run["output_throughput"]) == (None, None, 0.0)


def make_run(name: str, level: int | None, speed: float) -> dict[str, Any]:
    replies = [answered(0.0, [0.1, 0.2], 2)]
    more = {"endpoint": name, "max_concurrency": level, "output_throughput": speed}
    return serving_report.summarise(replies, 1.0, 2) | more


def test_table_is_side_by_side() -> None:
    runs = [make_run("a", 1, 10.0), make_run("a", 8, 50.0), make_run("b <c>", 8, 25.0)]
    lines = serving_report.table(runs).splitlines()
    assert lines[0].endswith("| of a |")
    assert [line.split(" | ")[1] for line in lines[2:]] == ["a", "a", "b <c>"]
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["100 % |", "100 % |", "50 % |"]


def test_plot_is_svg_with_every_point() -> None:
    runs = [make_run("a", 1, 10.0), make_run("a", None, 50.0), make_run("b <c>", 1, 25.0)]
    root = ET.fromstring(serving_plot.plot(runs, "x & y"))
    circles = root.iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == 9
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b <c>", "x & y", "no limit"} <= set(texts)


@given(st.floats(1e-6, 1e9))
def test_axes_end_just_above(value: float) -> None:
    limit = serving_plot.nice_limit(value)
    assert value * (1 - 1e-9) <= limit <= value * 2.5 * (1 + 1e-9)


def prompts(seed: int = 0, **more: Any) -> Prompts:
    return Prompts(
        route="completions", model="m", new=3, length=5, vocab=2000, seed=seed, **more
    )  # fmt: skip


def test_prompts_are_the_same_again_and_never_twice() -> None:
    first = [body["prompt"] for body in prompts().bodies(4, phase=0)]
    assert first == [body["prompt"] for body in prompts().bodies(4, phase=0)]
    second = [body["prompt"] for body in prompts().bodies(4, phase=1)]
    other = [body["prompt"] for body in prompts(seed=1).bodies(4, phase=0)]
    assert len({tuple(ids) for ids in first + second + other}) == 12
    assert all(len(ids) == 5 and min(ids) >= 1000 and max(ids) < 2000 for ids in first)


def test_texts_and_extras_go_into_bodies() -> None:
    made = prompts(texts=("x", "y"), extra=(("top_k", 1),), ignore_eos=False).bodies(3, phase=0)
    assert [body["prompt"] for body in made] == ["x", "y", "x"]
    assert made[0]["top_k"] == 1 and "ignore_eos" not in made[0]


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("ours=http://h:1/v1/", "ours", "http://h:1"),
        ("https://h:2", "h:2", "https://h:2"),
    ],
)
def test_endpoints(text: str, name: str, url: str) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.name, endpoint.url) == (name, url)


def results(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_whole_run(route: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The fake's vocabulary has 257 ids: on the completions route its prompts come from a file.
    texts = tmp_path / "prompts.txt"
    texts.write_text("one\n\ntwo\n")
    saved, plot = tmp_path / "r.json", tmp_path / "r.svg"
    options = [*FEW, "--route", route, "--json", str(saved), "--svg", str(plot), "--details"]
    options += ["--prompts-file", str(texts)] if route == "completions" else []
    with live(delay=0.01) as server, live(delay=0.03) as slower:
        ends = ["--endpoint", f"a={server.url}", "--endpoint", f"b={slower.url}/v1"]
        assert bench_serving.main([*ends, *options, "--concurrency", "1", "3"]) == 0
        # Two more say how many tokens words are, to the first endpoint.
        asked = 2 if route == "chat" else 0
        assert len(server.engine.requests) - asked == len(slower.engine.requests) == 8
        assert [ids for ids, _ in server.engine.requests[asked:]] == [
            ids for ids, _ in slower.engine.requests
        ]
    runs = results(capsys)["runs"]
    assert [(run["endpoint"], run["max_concurrency"]) for run in runs] == [
        ("a", 1), ("a", 3), ("b", 1), ("b", 3),
    ]  # fmt: skip
    for run in runs:
        assert (run["model"], run["completed"], run["failed"]) == (MODEL, 3, 0)
        assert run["total_output_tokens"] == 15
        assert run["device_idle"] is None  # the fake engine has no device
        delay = 10 if run["endpoint"] == "a" else 30
        assert run["median_e2el_ms"] >= 5 * delay
        assert run["median_ttft_ms"] >= delay
        assert run["median_ttft_ms"] + run["median_itl_ms"] <= run["p99_e2el_ms"]
    details = json.loads(saved.read_text())["runs"][0]["requests"]
    assert [len(request["arrivals_ms"]) for request in details] == [5, 5, 5]
    ET.fromstring(plot.read_text())
    assert bench_serving.main(["--compare", str(saved)]) == 0
    assert len(results(capsys)["runs"]) == 4


def saved_run(folder: Path, name: str, **settings: Any) -> str:
    """A file of results."""
    path = folder / name
    settings = {"route": "chat", "prompt": 32, "new": 16, "date": "2026-01-02"} | settings
    path.write_text(json.dumps({"settings": settings, "runs": [make_run(name, 1, 10.0)]}))
    return str(path)


def test_a_comparison_alone_has_the_settings_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = saved_run(tmp_path, "one"), saved_run(tmp_path, "two", new=17)
    plot = tmp_path / "r.svg"
    assert bench_serving.main(["--compare", one, two, "--svg", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "one: 32 prompt tokens, 16 new, chat, 2026-01-02\n" in out
    assert "two: 32 prompt tokens, 17 new, chat, 2026-01-02\n" in out
    assert "note: two has new 17, one 16\n" in out
    result = json.loads(out.splitlines()[-1])
    assert result["settings"] == {"route": "chat", "prompt": 32, "new": 16, "date": "2026-01-02"}
    assert result["compared"]["two"]["new"] == 17
    assert "32 prompt tokens, 16 new, chat" in plot.read_text()


def test_a_comparison_with_what_is_measured_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live() as server:
        ends = ["--endpoint", f"a={server.url}", "--concurrency", "1", "--route", "chat"]
        assert bench_serving.main([*ends, *FEW, "--compare", saved_run(tmp_path, "old")]) == 0
    out = capsys.readouterr().out
    assert "measured now: 6 prompt tokens, 5 new, chat, " in out
    assert "note: old has prompt 32, measured now 6\n" in out
    assert json.loads(out.splitlines()[-1])["settings"]["prompt"] == 6


@pytest.mark.parametrize("prompt", [128, 300])
def test_a_chat_prompt_has_as_many_tokens_as_asked_for(
    prompt: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # A byte is a token here, so words can only come near.
    options = ["--route", "chat", "--prompt", str(prompt), "--concurrency", "1"]
    with live() as server:
        ends = ["--endpoint", server.url, "--num-prompts", "3", "--new", "2", *options]
        assert bench_serving.main(ends) == 0
        sent = [len(ids) for ids, _ in server.engine.requests[2:]]
    assert all(abs(count - prompt) <= 3 for count in sent)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["runs"][0]["mean_input_tokens"] == sent[-1]
    assert ("prompts had" in out) == (abs(sent[-1] - prompt) > 2)


def test_prompts_that_cannot_be_as_short_are_said_to_be_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with live() as server:
        ends = ["--endpoint", f"a={server.url}", "--concurrency", "1", "--route", "chat"]
        assert bench_serving.main([*ends, *FEW, "--prompt", "1"]) == 0
        sent = len(server.engine.requests[-1][0])
    text = f"note: a at 1: prompts had {sent:.1f} tokens on average, not 1\n"
    assert sent > 3 and text in capsys.readouterr().out


def test_failures_are_counted_and_make_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    with live(fail_after=3) as server:
        options = [*FEW, "--route", "chat", "--warmup", "0", "--concurrency", "2"]
        assert bench_serving.main(["--endpoint", f"a={server.url}", *options]) == 1
    shown = capsys.readouterr()
    assert "a at 2: all 3 requests failed, " in shown.err
    assert "tok/s" not in shown.err and "None" not in shown.err
    out = shown.out.splitlines()
    (run,) = json.loads(out[-1])["runs"]
    assert (run["completed"], run["failed"]) == (0, 3)
    assert sum(run["errors"].values()) == 3
    assert any(line.startswith("note: a at 2: 3 failed: ") for line in out)


def test_the_idle_share_is_what_the_metrics_leave(capsys: pytest.CaptureFixture[str]) -> None:
    with live(delay=0.01) as server:
        busy = itertools.count(step=0.03)
        server.engine.stats = lambda: {"device_seconds": next(busy)}  # type: ignore[assignment]
        ends = ["--endpoint", f"a={server.url}", "--concurrency", "1"]
        assert bench_serving.main([*ends, *FEW, "--route", "chat"]) == 0
    [run] = results(capsys)["runs"]
    assert run["device_idle"] == pytest.approx(1 - 0.03 / run["duration"], abs=2e-3)


def test_request_rate_paces_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with live() as server:
        options = [*FEW, "--route", "chat", "--concurrency", "0", "--request-rate", "20"]
        assert bench_serving.main(["--endpoint", server.url, *options]) == 0
    (run,) = results(capsys)["runs"]
    assert run["max_concurrency"] is None
    assert run["duration"] > 0.01


@pytest.mark.parametrize("options", [[], ["--model", MODEL]])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_server_with_a_key_wants_that_option(
    route: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with live(settings=Settings(api_keys=("secret",))) as server:
        ends = ["--endpoint", server.url, "--route", route, "--concurrency", "1", *options]
        assert bench_serving.main([*ends, *FEW]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert "HTTP 401: " in message and message.endswith("(--api-key gives a key)")
        if route == "chat":
            assert bench_serving.main([*ends, *FEW, "--api-key", "secret"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--endpoint", "a=http://127.0.0.1:9"], "cannot connect"),
        (["--endpoint", "a=http://127.0.0.1:9", "--start", "a=false"], "ended with 1"),
        (["--compare", "/no/such/file"], "does not hold results"),
    ],
)
def test_no_measurement_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_serving.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--endpoint", "h:1"],
        ["--endpoint", "a=http://h:1", "--endpoint", "a=http://h:2"],
        ["--start", "b=serve", "--endpoint", "a=http://h:1", "--endpoint", "c=http://h:2"],
        ["--concurrency", "-1"],
        ["--num-prompts", "0"],
        ["--warmup", "x"],
        ["--extra-body", "[]"],
        ["--prompts-file", "/no/such/file"],
    ],
)
def test_bad_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_serving.parse(argv)


def test_a_server_is_started_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: Callable[[], int]
) -> None:
    port = free_port()
    script = tmp_path / "serve.py"
    script.write_text(SERVER.format(port=port))
    url = f"http://127.0.0.1:{port}"
    options = ["--new", "2", "--concurrency", "1", "--num-prompts", "2", "--warmup", "0"]
    ends = ["--endpoint", f"own={url}", "--start", f"python {script}"]
    assert bench_serving.main([*ends, *options, "--start-timeout", "30"]) == 0
    assert results(capsys)["runs"][0]["completed"] == 2
    assert bench_serving.main(["--endpoint", f"own={url}", *options]) == 2


@pytest.fixture
def free_port() -> Callable[[], int]:
    from scripts.bench_http_overhead import free_port

    return free_port


SERVER = f"""
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b'{{{{"data": [{{{{"id": "m"}}}}]}}}}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({sse(GOOD).decode().replace("{", "{{").replace("}", "}}")!r}.encode())

HTTPServer(("127.0.0.1", {{port}}), Handler).serve_forever()
"""
