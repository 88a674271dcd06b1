"""Faults that a simulated engine commits on purpose, for tests. Off unless asked for.

`--simulated-fault TOKEN:KIND` commits one whenever a step has a row of a sequence with the token in its prompt. The
real engine refuses the option. The kinds are:

- `raise` fails the step
- `nan` fails the row alone, as non-finite logits do
- `exit` ends the process
- `hang` sleeps for an hour
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blockyard.worker.sequences.step_plan import ScheduledRow

FaultKind = Literal["raise", "nan", "exit", "hang"]
EXIT_CODE = 70
HANG_SECONDS = 3600.0


class InjectedFault(RuntimeError):
    """The step fails because of a simulated fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """One kind of fault, and the token that triggers it."""

    token: int
    kind: FaultKind

    @classmethod
    def parse(cls, text: str) -> "SimulatedFault":
        """Parse TOKEN:KIND. Raises ValueError."""
        kinds: dict[str, FaultKind] = {kind: kind for kind in get_args(FaultKind)}
        token, _, kind = text.partition(":")
        if not token.isdecimal() or kind not in kinds:
            raise ValueError(
                f"a simulated fault is TOKEN:KIND, with a kind of {', '.join(kinds)}, not {text!r}"
            )
        return cls(token=int(token), kind=kinds[kind])

    def strike(self, rows: Sequence[ScheduledRow]) -> frozenset[int]:
        """Commit the fault if any row triggers it. Return the indices of the rows that fail.

        Raises InjectedFault, ends the process, or sleeps, as the kind says.
        """
        struck = frozenset(index for index, row in enumerate(rows) if self._is_marked(row))
        if struck:
            match self.kind:
                case "raise":
                    raise InjectedFault("a simulated fault")
                case "exit":
                    os._exit(EXIT_CODE)
                case "hang":
                    time.sleep(HANG_SECONDS)
                case "nan":
                    pass
        return struck

    def _is_marked(self, row: ScheduledRow) -> bool:
        """Return whether the prompt of the row's sequence holds the token. Generated tokens may be any: they do not
        count."""
        return self.token in row.sequence.tokens[: row.sequence.prompt_length]
