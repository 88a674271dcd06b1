"""The rules by which a request that loses its worker fails."""

from contextlib import nullcontext

import pytest
from blockyard.router.errors import PoisonRequest, WorkerLost
from blockyard.router.generation.losses import (
    MAX_QUARANTINED,
    QUARANTINE_SECONDS,
    Losses,
    Quarantine,
)

A, B, C = ("a:1", "life-a"), ("b:1", "life-b"), ("c:1", "life-c")


@pytest.mark.parametrize(
    ("max_migrations", "lives", "suspicious", "back", "error"),
    [
        (5, (A, B, C, A, B, C), (), (), WorkerLost),
        (100, (A, B, C), (A, C), (), PoisonRequest),
        (100, (A, B, B, C), (A, B, C), (A,), PoisonRequest),
        (0, (A,), (), (), WorkerLost),
    ],
    ids=["a bystander has its budget", "two deaths", "who answers again had not died", "no budget"],
)
def test_a_request_is_given_up_at_the_last_of_these_losses(max_migrations, lives, suspicious, back, error):
    losses = Losses(max_migrations=max_migrations)
    for number, life in enumerate(lives):
        is_last = number == len(lives) - 1
        with pytest.raises(error) if is_last else nullcontext() as raised:
            losses.add(
                life,
                is_suspicious=life in suspicious,
                is_alive=lambda key, number=number: number > 0 and key in back,
                tokens_emitted=7,
            )
    if error is WorkerLost:
        assert raised.value.metadata == {"tokens_emitted": "7"}


def test_the_quarantine_holds_a_prompt_for_its_time_and_is_bounded() -> None:
    now = 0.0
    quarantine = Quarantine(lambda: now)
    quarantine.add(b"poison")
    now = QUARANTINE_SECONDS / 2
    quarantine.check(b"wholesome")
    with pytest.raises(PoisonRequest):
        quarantine.check(b"poison")
    now = QUARANTINE_SECONDS
    quarantine.check(b"poison")
    assert len(quarantine) == 0
    for number in range(MAX_QUARANTINED + 5):
        quarantine.add(str(number).encode())
    assert len(quarantine) == MAX_QUARANTINED
    with pytest.raises(PoisonRequest):
        quarantine.check(str(MAX_QUARANTINED).encode())
