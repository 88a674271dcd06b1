"""A chat template from an untrusted author: it runs in a process of its own, with bounded time and memory."""

import json
import os
import shutil
from pathlib import Path

import pytest
from blockyard.router.tokenizing.service import (
    ChatMessage,
    ChatPrompt,
    PromptError,
    TextPrompt,
    TokenizerService,
    TokenizingError,
)

from tests.pauses import free_loop

from .rig import CANARY, MODEL

CHAT = ChatPrompt([ChatMessage("user", CANARY)])
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""The longest loops that the sandbox permits, one inside the other."""
MEMORY = (
    "{% set m = namespace(x='a' * 1000000) %}{% for i in range(99) %}{% set m.x = m.x ~ m.x %}{% endfor %}"
)


def model_with(template: str, folder: Path) -> Path:
    copy = Path(shutil.copytree(MODEL, folder / "model"))
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return copy


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (LOOP, TokenizingError),
        (MEMORY, TokenizingError),
        ("{{ 'a' * 99999999999 }}", TokenizingError),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", PromptError),
        ("{{ cycler.__init__.__globals__.os.system('touch it-ran') }}", PromptError),
        ("{% include '/etc/passwd' %}", PromptError),
        ("{{ raise_exception(messages[0]['content']) }}", PromptError),
        ("{{ messages[9]['content'] }}", PromptError),
        ("{{ 1 / 0 }}", PromptError),
    ],
)
async def test_a_hostile_template_ends_its_own_call_alone(
    template: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with TokenizerService(model_with(template, tmp_path), timeout_seconds=4.0) as service:
        async with free_loop(5_000):
            with pytest.raises(error) as caught:
                await service.prepare(CHAT, root=None, block_size=16)
        assert CANARY not in str(caught.value)
        assert (await service.prepare(TextPrompt("good"), root=None, block_size=16)).num_tokens
    assert "it-ran" not in os.listdir(tmp_path)
