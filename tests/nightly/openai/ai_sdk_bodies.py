"""Bodies that Vercel's AI SDK sends (ai 6.0.326, @ai-sdk/openai 3.0.141), kept from a run of test_clients.py.

Each is the last request of a conversation of five turns with a tool. The inputs of the earlier requests are its
beginnings. What the server had made stands there as "<response.item.field>".
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

THOUGHTS = ("I must look it up.", "Now I know it.")
"""Reasoning of the model before it calls, and before it answers."""
TEXTS = ("I look.", "It is mild in Oslo.")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = tuple(
    f"{thought}\n</think>\n\n{text}"
    for thought, text in zip(THOUGHTS, (f"{TEXTS[0]}\n{CALL}", TEXTS[1]), strict=True)
)
"""Outputs that call and that answer. The prompt begins the reasoning."""
Output = Sequence[dict[str, Any]]
NAMED = re.compile(r"<(\d+)\.(\d+)\.(\w+)>")
FIELDS = ("id", "call_id", "encrypted_content")
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    mode: (kept["options"], kept["body"])
    for mode, kept in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
"""The provider's options and the body, by mode."""


def named(body: dict[str, Any], outputs: Sequence[Output]) -> dict[str, Any]:
    """Return a body with names in place of what the responses had made."""
    written = json.dumps(body)
    for number, output in enumerate(outputs):
        for place, item in enumerate(output):
            for field in FIELDS:
                if item.get(field):
                    written = written.replace(f'"{item[field]}"', f'"<{number}.{place}.{field}>"')
    found: dict[str, Any] = json.loads(written)
    return found


def filled(item: dict[str, Any], outputs: Sequence[Output]) -> dict[str, Any]:
    """Return an item with what the responses have made in place of its names."""
    made = NAMED.sub(lambda name: outputs[int(name[1])][int(name[2])][name[3]], json.dumps(item))
    found: dict[str, Any] = json.loads(made)
    return found


def first_named(item: dict[str, Any]) -> tuple[int, int] | None:
    """Return the response and the place in its output of the first thing that an item names."""
    name = NAMED.search(json.dumps(item))
    return None if name is None else (int(name[1]), int(name[2]))
