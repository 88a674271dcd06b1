"""Answer a file of prompts into a file: python examples/batch_file.py IN.jsonl OUT.jsonl [HOST:PORT]

IN has one JSON object a line with `prompt`. OUT gets the same objects, in the same order, with `text` or `error`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from blockyard.router.client import AsyncClient, BlockyardError

if len(sys.argv) < 3:
    sys.exit("usage: python examples/batch_file.py IN.jsonl OUT.jsonl [HOST:PORT]")
SOURCE, TARGET = Path(sys.argv[1]), Path(sys.argv[2])
ADDRESS = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1:50051"
IN_FLIGHT = 16
BACKGROUND = 10
"""Priority of the batch: interactive requests go first. Priority ages, so that a batch never starves."""


async def answered(client: AsyncClient, permits: asyncio.Semaphore, row: dict[str, Any]) -> dict[str, Any]:
    async with permits:
        try:
            answer = await client.generate(
                row["prompt"], max_tokens=32, temperature=0, priority=BACKGROUND, timeout_seconds=600
            )
        except BlockyardError as error:
            return {**row, "error": error.reason or error.code.name}
    return {**row, "text": answer.text, "tokens": answer.finish.completion_tokens}


async def all_answered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    permits = asyncio.Semaphore(IN_FLIGHT)
    async with AsyncClient(ADDRESS) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(answered(client, permits, row)) for row in rows]
    return [task.result() for task in asked]


prompts = [json.loads(line) for line in SOURCE.read_text(encoding="utf-8").splitlines()]
answers = asyncio.run(all_answered(prompts))
TARGET.write_text("".join(json.dumps(row) + "\n" for row in answers), encoding="utf-8")
print(f"{len(answers)} prompts, {sum('error' in row for row in answers)} failed")
