"""Handle the errors of the client: python examples/errors_and_timeouts.py [HOST:PORT]

Before the first token the client retries two errors by itself. If a router does not answer, it tries the next address.
If a router is overloaded, it waits for the delay that the router gave. It raises all other errors at once.
"""

import sys

from blockyard.router.client import (
    BlockyardError,
    Client,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TimedOutError,
    UnavailableError,
)

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def outcome(client: Client, **arguments: object) -> str:
    """Describe how a request ends. Mistakes of the program come first, then the state of the cluster."""
    try:
        client.generate("def f(x):", **arguments)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        fields = ", ".join(f"{wrong.field} {wrong.description}" for wrong in error.field_violations)
        return f"the request is wrong: {fields}"
    except NotFoundError as error:
        return f"not found: {error.reason}"
    except TimedOutError:
        return "it took too long, and the request was ended on its worker"
    except OverloadedError as error:
        return f"overloaded, retry in {error.retry_delay_seconds} s"
    except UnavailableError as error:
        return f"no router answers: {error}"
    except BlockyardError as error:
        return f"an error of the cluster: {error.code.name} {error.reason}"
    return "an answer"


with Client(ADDRESS, timeout_seconds=30.0, retries=2) as client:
    print("top_p=7       ", outcome(client, top_p=7.0))
    print("another model ", outcome(client, model="gpt-0"))
    print("0.05 s        ", outcome(client, timeout_seconds=0.05, max_tokens=1000, ignore_eos=True))
    print("all is well   ", outcome(client, max_tokens=4))
with Client("127.0.0.1:1", timeout_seconds=5.0, retries=1) as unreachable:
    print("wrong port    ", outcome(unreachable))
