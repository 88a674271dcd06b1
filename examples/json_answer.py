"""Get an answer that fits a JSON schema: python examples/json_answer.py [HOST:PORT]"""

import json
import sys

from blockyard.router.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 1, "maximum": 500},
        "is_test": {"type": "boolean"},
    },
    "required": ["name", "lines", "is_test"],
    "additionalProperties": False,
}

with Client(ADDRESS) as client:
    answer = client.generate("A Python file, as JSON: ", json_schema=SCHEMA, max_tokens=200, seed=3)

# Each token follows the schema. Only max_tokens can cut the answer short.
if answer.finish.reason != "stop":
    sys.exit(f"the answer was cut off after {answer.finish.completion_tokens} tokens")
described = json.loads(answer.text)
print(f"{described['name']!r} has {described['lines']} lines, test: {described['is_test']}")
