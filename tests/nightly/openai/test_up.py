"""`blockyard up --http-port` on real Ray, by the command of docs/gateway.md: two routers behind one HTTP port."""

import re
import shlex
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.system.harness import Command, remembered_state

GUIDE = Path(__file__).parents[3] / "docs/gateway.md"
(LINE,) = re.findall(r"^```bash\n(blockyard up .*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
SHOWN = shlex.split(LINE)


def test_up_serves_openais_api_and_a_restart_keeps_its_address(tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="gateway")
    program, *arguments = SHOWN
    assert (program, arguments[-2:]) == ("blockyard", ["--http-port", "8000"])
    started = command.run(*arguments[:-1], "0", "--routers", "2", "--deterministic")
    assert started.returncode == 0, started.stderr
    try:
        (address,) = remembered_state(command).gateways
        assert re.search(rf"OpenAI +{address}", started.stdout)
        assert command.place("router-1")["http_address"] == address
        with OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=60.0) as client:
            text = written_by(client)
            assert text
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="demo", prompt="x", suffix="y")
            restarted = command.run("restart", "router-0", "router-1")
            assert restarted.returncode == 0, restarted.stderr
            assert written_by(client) == text
    finally:
        assert command.run("down", "--drain", "0").returncode == 0


def written_by(client: OpenAI) -> str:
    messages = [{"role": "user", "content": "Write a function that adds."}]
    stream = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,  # type: ignore[arg-type]
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
