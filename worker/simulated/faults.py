"""Faults that a simulated engine commits on purpose, so that tests can see what they cost. Off unless asked for.

`--simulated-fault TOKEN:KIND` commits one whenever a step has a row of a prompt that holds the token: `raise` fails the
step, `nan` spoils the row alone as logits do that are not finite, `exit` ends the process, `hang` never returns. The
model's own engine refuses the option.
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
    """The step fails because it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """One kind of fault, and the token that sets it off."""

    token: int
    kind: FaultKind

    @classmethod
    def parse(cls, text: str) -> "SimulatedFault":
        """Raises ValueError."""
        kinds: dict[str, FaultKind] = {kind: kind for kind in get_args(FaultKind)}
        token, _, kind = text.partition(":")
        if not token.isdecimal() or kind not in kinds:
            raise ValueError(
                f"a simulated fault is TOKEN:KIND, with a kind of {', '.join(kinds)}, not {text!r}"
            )
        return cls(token=int(token), kind=kinds[kind])

    def strike(self, rows: Sequence[ScheduledRow]) -> frozenset[int]:
        """The rows that yield nothing. Raises InjectedFault, or does not return."""
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
        """Prompts alone: what is generated may be any token."""
        return self.token in row.sequence.tokens[: row.sequence.prompt_length]
