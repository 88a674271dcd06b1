"""Send many requests from one program, a few in flight: python examples/many_requests.py [HOST:PORT]"""

import asyncio
import sys

from blockyard.router.client import AsyncClient, Completion

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
NUM_REQUESTS = 24
IN_FLIGHT = 8
"""More would wait in the router. Beyond its limits the router refuses, and the client retries after the given delay."""


async def main() -> None:
    permits = asyncio.Semaphore(IN_FLIGHT)

    async with AsyncClient(ADDRESS) as client:

        async def ask(number: int) -> Completion:
            async with permits:
                return await client.generate(f"def function_{number}(", max_tokens=24, temperature=0)

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(number)) for number in range(NUM_REQUESTS)]

    answers = [task.result() for task in asked]
    for worker in sorted({answer.finish.worker_id for answer in answers}):
        served = [answer for answer in answers if answer.finish.worker_id == worker]
        print(f"{worker} answered {len(served)} of {NUM_REQUESTS}")
    print(answers[0].text)


asyncio.run(main())
