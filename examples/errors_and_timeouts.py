"""What can go wrong, and how it is told: python examples/errors_and_timeouts.py [HOST:PORT]

Before the first token the client retries by itself what is worth it: a router that is away (on another address, if
it has one), and an overload, when the router said to come back. Everything else is raised at once.
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


def told(client: Client, **arguments: object) -> str:
    """In the order in which one would look: the program's mistake, then the cluster's state."""
    try:
        client.generate("def f(x):", **arguments)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        fields = ", ".join(f"{wrong.field} {wrong.description}" for wrong in error.field_violations)
        return f"the request is wrong: {fields}"
    except NotFoundError as error:
        return f"there is no such thing: {error.reason}"
    except TimedOutError:
        return "it took too long, and the request was ended on its worker"
    except OverloadedError as error:
        return f"come back in {error.retry_delay_seconds} s"
    except UnavailableError as error:
        return f"nobody answers: {error}"
    except BlockyardError as error:
        return f"a fault of the cluster: {error.code.name} {error.reason}"
    return "an answer"


with Client(ADDRESS, timeout_seconds=30.0, retries=2) as client:
    print("top_p=7       ", told(client, top_p=7.0))
    print("another model ", told(client, model="gpt-0"))
    print("0.05 s        ", told(client, timeout_seconds=0.05, max_tokens=1000, ignore_eos=True))
    print("all is well   ", told(client, max_tokens=4))
with Client("127.0.0.1:1", timeout_seconds=5.0, retries=1) as nobody:
    print("wrong port    ", told(nobody))
