"""Hold a conversation that reuses its own cached beginning: python examples/chat_session.py [HOST:PORT]"""

import secrets
import sys

from blockyard.router.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTIONS = ("Write a function that adds two numbers.", "Now subtract.", "Now test both.")

# Among workers of nearly equal cost, a session's request goes to the worker of the last one.
session_id = f"chat-{secrets.token_hex(8)}"
messages = [{"role": "system", "content": "You write short Python functions, and you never explain them."}]

with Client(ADDRESS) as client:
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.generate(messages=messages, session_id=session_id, max_tokens=48, temperature=0)
        messages.append({"role": "assistant", "content": answer.text})
        finish = answer.finish
        print(f"> {question}\n{answer.text}")
        print(f"[{finish.worker_id}: {finish.cached_tokens} of {finish.prompt_tokens} prompt tokens cached]")
