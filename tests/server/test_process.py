"""`grout serve` as a process: TLS, draining, request logs, options from outside."""

import json
import shutil
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench_http_overhead import free_port
from tests.server.command import start
from tests.server.fakes import REPLY, wait_for

ASK = {"messages": [{"role": "user", "content": "a secret word"}]}


def ready(process: "subprocess.Popen[str]") -> str:
    """The server's address, once it answers."""
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.readline()
    return line.split()[-1].removesuffix("/v1")


def stop(process: "subprocess.Popen[str]") -> str:
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    return err


def test_sigterm_finishes_what_runs() -> None:
    fake: dict[str, object] = {"reply": [str(i % 10) for i in range(100)], "delay": 0.04}
    with start("serve", "--port", "0", fake=fake) as process:
        url = ready(process)
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
            http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response,
        ):
            received = response.iter_lines()
            next(received)
            process.send_signal(signal.SIGTERM)
            events = [line[6:] for line in received if line.startswith("data: ")]
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health", trust_env=False)
        _, err = process.communicate(timeout=60)
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == "0123456789" * 10
    assert process.returncode == 0
    assert "up to 30 s for 1 running requests" in err
    line = json.loads(next(line for line in err.splitlines() if line.startswith("{")))
    assert (line["status"], line["completion_tokens"]) == (200, 101)
    assert "secret" not in err


def test_sigterm_waits_no_longer_than_told() -> None:
    fake: dict[str, object] = {"endless": True, "delay": 0.02, "max_model_len": 10**9}
    flags = ["--shutdown-timeout", "1", "--log-requests", "off"]
    with start("serve", "--port", "0", *flags, fake=fake) as process:
        url = ready(process)
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
            http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response,
        ):
            lines = response.iter_lines()  # kept: a dropped iterator closes the connection
            next(lines)
            err = stop(process)
            *_, failed, done = [line[6:] for line in lines if line]
    assert json.loads(failed)["error"]["code"] == "engine_down"
    assert done == "[DONE]"
    assert "ending 1 requests" in err
    assert '"path"' not in err


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_for_what_the_server_says(
    both: bool, buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty value is none.
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    port = free_port()
    flags = ["--port", str(port), "--log-requests", "text"]
    with open("/dev/full", "w") as full:
        out = full if both else subprocess.DEVNULL
        with start("serve", *flags, fake={}, stdout=out, stderr=full) as process:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

                def answers() -> bool:
                    assert process.poll() is None
                    try:
                        return http.get("/health", timeout=60).status_code == 200
                    except httpx.ConnectError:
                        return False

                wait_for(answers)
                # More than the buffers of a stream hold.
                ask = {"messages": [{"role": "user", "content": "x" * 400}]}
                for _ in range(100):
                    answer = http.post("/v1/chat/completions", json=ask, timeout=60).json()
                    assert answer["choices"][0]["message"]["content"] == "".join(REPLY)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out",
         str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with start("serve", "--port", "0", *flags, fake={}) as process:
        url = ready(process)
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        answer: Any = httpx.post(
            f"{url}/v1/chat/completions", json=ASK, verify=trusted, trust_env=False
        ).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        stop(process)


def test_options_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grout.toml"
    file.write_text('port = 0\nserved-model-name = ["x", "y"]\nmax-num-seqs = 5\n')
    with start("serve", "--config", str(file), "--enforce-eager", fake={}) as process:
        url = ready(process)
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        err = stop(process)
    assert [model["id"] for model in models] == ["x", "y"]
    assert "max_num_seqs=5" in err
    assert "enforce_eager=True" in err
    assert "served_model_name='x'" in err
