"""The `grout` command: exit codes, one-line errors, and whole sessions over sockets and pipes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server.cli import main
from tests.server.command import ROOT, run, start
from tests.server.fakes import MODEL, FakeEngine, Live, wait_for


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot "),
        (["serve", "--por", "1"], "unrecognized arguments"),
        (["serve", "a", "b"], "unrecognized arguments: b"),
        (["serve", "--port", "70000"], "'70000' is not a port"),
        (["serve", "--port", "-1"], "'-1' is not a port"),
        (["serve", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["serve", "--load-format", "gguf"], "invalid choice: 'gguf'"),
        (["serve", "--max-num-seqs", "many"], "invalid int value: 'many'"),
        (["serve", "--port", "0", "--device", "tpu"], "device must be"),
        (["serve", "--port", "0", "--max-model-len", "0"], "max_model_len must be"),
        (["serve", "--port", "0", "--max-num-seqs", "0"], "max_num_seqs must be"),
        (["serve", "--port", "0", "--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
        (["serve", "--host", "256.1.1.1", "--port", "0"], "256.1.1.1"),
        (["serve", "--api-key", ""], "--api-key is empty"),
        (["serve", "--api-key", " \t"], "--api-key is empty"),
        (["serve", "--api-key", "k\x00"], "--api-key: the key holds a control character"),
        (["serve", "--api-key", "a\nb"], "--api-key: the key holds a control character"),
        (["serve", "--served-model-name", ""], "--served-model-name is empty"),
        (["serve", "--served-model-name", "a", "/"], "'/' is taken for one of the --served-model"),
        (["chat", "--url", "localhost:8000"], "http://"),
        (["chat", "--url", "http://x", "--device", "cpu"], "--device"),
        (["chat", "--api-key", "k"], "--url"),
        (["info", "--port", "1"], "unrecognized arguments: --port"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert err.startswith("grout: error: ")
    assert says in err
    assert out == ""


def test_errors_from_the_shell() -> None:
    code, out, err = run("serve", "--nonsense")
    assert (code, out) == (2, "")
    assert err == "grout: error: unrecognized arguments: --nonsense (see 'grout serve --help')\n"


@pytest.mark.parametrize("text", ["abc", "0"])
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("chat",)])
def test_a_wrong_number_of_threads_is_told_before_the_model_is_opened(
    command: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILERT_CPU_THREADS", text)
    code, out, err = run(*command, "no-such-model", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err == (
        "grout: opening no-such-model\n"
        f"grout: error: TILERT_CPU_THREADS is '{text}'; it takes a number of threads, 1 or more\n"
    )


def test_version_and_help() -> None:
    code, out, err = run("--version")
    assert (code, out.split()[0], err) == (0, "grout", "")
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("serve", "chat", "info"))


def test_help_imports_nothing_heavy() -> None:
    check = (
        "import sys; from server.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('fastapi', 'numpy', 'pydantic', 'asyncio') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_taken_port_is_found_before_the_model_is_loaded(taken_port: int) -> None:
    code, out, err = run("serve", "--port", str(taken_port), fake={})
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use" in err


@pytest.mark.parametrize("name", ["models", "tilert"])
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_shadowing_package_is_named(tmp_path: Path, name: str, kind: str) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    shutil.copytree(ROOT / "server", home / "server")
    for package in ("grout", "models", "tilert"):
        (home / package).mkdir()
        (home / package / "__init__.py").touch()
    intruder = other / f"{name}.py" if kind == "module" else other / name
    intruder.mkdir(parents=True) if kind == "package" else other.mkdir()
    (intruder / "__init__.py" if kind == "package" else intruder).touch()
    check = "from server.origin import check_origin; print(check_origin())"

    def attempt(*folders: Path) -> "subprocess.CompletedProcess[str]":
        # -S: an editable install's .pth would lead back to the real packages.
        return subprocess.run(
            [sys.executable, "-S", "-c", check],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
            capture_output=True,
            text=True,
            check=False,
        )

    assert attempt(home).stdout == f"{home}\n"
    shadowed = attempt(other, home)
    assert f"'{name}' belongs to {intruder}, which shadows" in shadowed.stderr
    shutil.rmtree(home / name)
    assert f"'{name}' is missing from {home}" in attempt(home).stderr


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serve_from_start_to_stop(stop: signal.Signals) -> None:
    flags = ["--max-model-len", "99", "--dtype", "float32", "--api-key", "k"]
    with start("serve", "some/model", "--port", "0", *flags, fake={"closed": False}) as process:
        assert process.stdout is not None
        ready, example = process.stdout.readline(), process.stdout.readline()
        url = ready.split()[-1]
        assert ready.startswith(f"grout: ready, {MODEL} at http://127.0.0.1:")
        assert f"curl {url}/chat/completions" in example
        with openai.OpenAI(
            base_url=url,
            api_key="k",
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            assert client.models.list().data[0].id == MODEL
        process.send_signal(stop)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "grout: stopped\n")
    assert "grout: opening some/model" in err
    assert "max_model_len=99" in err
    assert "dtype='float32'" in err
    assert "Traceback" not in err


def test_the_curl_example_works() -> None:
    with start("serve", "--port", "0", fake={"model_id": "it's/a model"}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        command = process.stdout.readline().removeprefix("grout: try ")
        assert "What is the capital of France?" in command
        curl = shutil.which("curl")
        if curl is not None:
            answer = subprocess.run(
                f"{command.strip()} --noproxy '*' -s", shell=True, capture_output=True, check=True
            )
            assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_chat_over_a_pipe_keeps_and_clears_history() -> None:
    lines = "one\n/nope\ntwo\n/clear\nthree\n/exit\nfour\n"
    fake = {"reply": ["<think>", "hm", "</think>", "\n\n", "An", "swer"], "max_model_len": 90}
    code, out, err = run("chat", "--system", "S", fake=fake, stdin=lines)
    assert code == 0
    assert "max_num_seqs=1" in err
    answers = [line for line in out.splitlines() if line == "Answer"]
    assert len(answers) == 3
    assert out.splitlines().count("hm") == 3
    assert "there is no command /nope" in out
    assert out.count("7 tokens, ") == 3
    assert "tok/s" in out


def test_chat_says_why_there_is_no_answer() -> None:
    code, out, _ = run("chat", fake={"max_model_len": 40}, stdin=f"{'x' * 50}\nhi\n")
    assert code == 0
    assert "[error: This model's context is 40 tokens" in out
    assert "bye" in out  # the message too long was forgotten, so the next one fits


def test_chat_without_a_template() -> None:
    code, out, err = run("chat", fake={"chat_template": None})
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"grout: error: {MODEL} has no chat template, so it cannot chat"


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    fake = {"endless": True, "delay": 0.02, "reply": ["tick\n"], "max_model_len": 10**6}
    with start("chat", fake=fake) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        for line in process.stdout:
            if line == "tick\n":
                break
        process.send_signal(signal.SIGINT)
        for line in process.stdout:
            if line == "[stopped]\n":
                break
        out, err = process.communicate("/exit\n", timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def ask(monkeypatch: pytest.MonkeyPatch, lines: list[str], *arguments: str) -> int:
    given = iter(lines)

    def fake_input(_: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", fake_input)
    return main(["chat", *arguments])


def test_chat_with_a_server(
    server: Live[FakeEngine],
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    settings = ["--temperature", "0", "--max-tokens", "50", "--no-think"]
    assert ask(monkeypatch, ["hi", "more"], "--url", server.url, *settings) == 0
    out = capsys.readouterr().out
    assert out.count(engine.text) == 2
    assert out.count("8 tokens, ") == 2
    assert engine.prompt() == f"<user>hi\n<assistant>{engine.text}\n<user>more\n<assistant>"
    assert engine.requests[-1][1].temperature == 0
    assert engine.requests[-1][1].max_tokens == 50
    assert engine.chat_template is not None
    assert engine.chat_template.kwargs == {"enable_thinking": False}


def test_chat_shows_a_servers_errors(
    server: Live[FakeEngine],
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    engine.fail_after = 2
    assert ask(monkeypatch, ["hi"], "--url", f"{server.url}/v1/", "--temperature", "0") == 0
    assert "[error: Generation failed inside the server" in capsys.readouterr().out
    assert ask(monkeypatch, ["hi"], "--url", server.url, "--temperature", "3") == 0
    assert "[error: Invalid 'temperature'" in capsys.readouterr().out
    assert ask(monkeypatch, ["hi"], "other", "--url", server.url) == 0
    assert "[error: The model 'other' does not exist" in capsys.readouterr().out


def test_ctrl_c_stops_a_servers_answer(
    server: Live[FakeEngine], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    engine.endless, engine.delay = True, 0.01

    def interrupt(_: object, piece: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.terminal.Screen.show", interrupt)
    assert ask(monkeypatch, ["hi"], "--url", server.url) == 0
    wait_for(lambda: engine.running == 0)
    assert engine.aborted == 1


def test_ctrl_c_at_a_prompt_says_how_to_leave(
    server: Live[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    said = iter([KeyboardInterrupt(), "/exit"])

    def line(_: str) -> str:
        found = next(said)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr("builtins.input", line)
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out.endswith("\n/exit or Ctrl-D leaves\n")


def test_a_variable_that_is_no_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUT_MAXX", "3")
    with start("serve", "--port", "0", fake={}) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("grout: ready")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert "grout: warning: the variable GROUT_MAXX is no option of serve, and is ignored" in err


def test_chat_with_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        port = deaf.getsockname()[1]
        assert main(["chat", "--url", f"http://127.0.0.1:{port}"]) == 2
    assert "cannot reach http://127.0.0.1" in capsys.readouterr().err


def test_info() -> None:
    code, out, _ = run("info", "--json", "some/model")
    facts = json.loads(out)
    assert code == 0
    assert facts["folder"] == str(ROOT)
    assert facts["devices"][0]["device"] == "cpu"
    assert facts["model"]["id"] == "some/model"
    assert facts["versions"]["numpy"]
    code, out, _ = run("info")
    assert code == 0
    assert f"in {ROOT}" in out
