"""Step arrays: what rank 0 sends to the other ranks, so that they compute a step with it. Arrays of integers alone.

Shapes: R rows, B blocks of a row, T tokens, U tokens that the host does not know yet, M block moves, N adapter loads.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Every value fits in int32."""


NO_SAMPLE = 0
LOGITS = 1
LARGEST = 2
"""The token of the largest logit alone."""
NONE: Integers = np.empty(0, dtype=np.int64)
NO_PAIRS: Integers = np.empty((0, 2), dtype=np.int64)
NO_LOADS: Integers = np.empty((0, 3), dtype=np.int64)


def _none() -> Integers:
    return NONE


def _no_pairs() -> Integers:
    return NO_PAIRS


def _no_loads() -> Integers:
    return NO_LOADS


@dataclass(slots=True, kw_only=True, eq=False)
class StepArrays:
    """One step, or a part of one that is run again. The order of work: moves, loads, rows.

    Nothing changes it. It is not frozen, because each step makes one, and that would take twice as long.
    """

    numbers: Integers = field(default_factory=_none)
    """Two: the number of this execution, which rises by one with each, and the number of the plan's step. The latter is
    the same where a step is run again."""
    to_host_M2: Integers = field(default_factory=_no_pairs)
    from_host_M2: Integers = field(default_factory=_no_pairs)
    copies_M2: Integers = field(default_factory=_no_pairs)
    query_R: Integers = field(default_factory=_none)
    """Tokens of each row."""
    context_R: Integers = field(default_factory=_none)
    """Tokens of each row and those before them."""
    tables_RB: Integers = field(default_factory=_no_pairs)
    tokens_T: Integers = field(default_factory=_none)
    unknown_U: Integers = field(default_factory=_none)
    """Indices in T of tokens that rank 0 has on its device alone. It broadcasts them."""
    scored_R: Integers = field(default_factory=_none)
    """Number of first positions of each row whose logits score the prompt. Empty where no row scores any."""
    samples_R: Integers = field(default_factory=_none)
    """NO_SAMPLE, LOGITS or LARGEST: what rank 0 needs of each row's last position."""
    loads_N3: Integers = field(default_factory=_no_loads)
    """LoRA adapters that are loaded: slot, rank, and the linear layers that they change (a bit for each). Rank 0
    broadcasts their weights."""
    slots_R: Integers = field(default_factory=_none)
    """Slot of each row's adapter, BARE without one. Empty where no row has one."""
