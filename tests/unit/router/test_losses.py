"""The rules by which a request that loses its worker fails."""

import pytest
from blockyard.router.errors import PoisonRequest, WorkerLost
from blockyard.router.generation.losses import (
    MAX_QUARANTINED,
    QUARANTINE_SECONDS,
    Losses,
    Quarantine,
    WorkerKey,
)

A, B, C = ("a:1", "life-a"), ("b:1", "life-b"), ("c:1", "life-c")


class Cluster:
    """Incarnations that answer again."""

    def __init__(self) -> None:
        self.alive: set[WorkerKey] = set()

    def lose(self, losses: Losses, life: WorkerKey, *, is_suspicious: bool = True) -> None:
        losses.add(life, is_suspicious=is_suspicious, is_alive=self.alive.__contains__, tokens_emitted=7)


def test_a_bystander_is_no_poison_however_many_workers_it_loses_within_its_budget() -> None:
    losses, cluster = Losses(max_migrations=5), Cluster()
    for life in (A, B, C, A, B):
        cluster.lose(losses, life, is_suspicious=False)
    with pytest.raises(WorkerLost) as lost:
        cluster.lose(losses, C, is_suspicious=False)
    assert lost.value.metadata == {"tokens_emitted": "7"}


def test_two_deaths_before_any_token_make_a_poison_whatever_the_budget() -> None:
    losses, cluster = Losses(max_migrations=100), Cluster()
    cluster.lose(losses, A)
    cluster.lose(losses, B, is_suspicious=False)
    with pytest.raises(PoisonRequest):
        cluster.lose(losses, C)


def test_who_answers_again_had_not_died() -> None:
    losses, cluster = Losses(max_migrations=100), Cluster()
    cluster.lose(losses, A)
    cluster.alive.add(A)
    cluster.lose(losses, B)
    cluster.lose(losses, B)
    with pytest.raises(PoisonRequest):
        cluster.lose(losses, C)


def test_no_budget_means_no_second_try() -> None:
    losses = Losses(max_migrations=0)
    with pytest.raises(WorkerLost):
        Cluster().lose(losses, A, is_suspicious=False)


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
