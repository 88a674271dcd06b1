"""Print the answer of a chat while it is generated: python examples/streaming_chat.py [HOST:PORT]"""

import sys

from blockyard.router.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
MESSAGES = [
    {"role": "system", "content": "You write short Python functions."},
    {"role": "user", "content": "Write a function that joins two paths."},
]

with Client(ADDRESS) as client:
    finish = None
    for delta in client.stream(messages=MESSAGES, max_tokens=64, temperature=0.7, seed=7):
        print(delta.text, end="", flush=True)
        finish = delta.finish

assert finish is not None, "a stream without its last message raises LostTokensError"
print(f"\n{finish.completion_tokens} tokens from {finish.worker_id}, because of {finish.reason}")
print(f"{finish.cached_tokens} of {finish.prompt_tokens} prompt tokens were cached")
print(f"the first token came after {finish.time_to_first_token_seconds * 1000:.0f} ms")
