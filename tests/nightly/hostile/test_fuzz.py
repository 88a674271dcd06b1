"""The fuzzer with a fixed seed, and a check that its own oracle can fail."""

import grpc

from .fuzz import SERVICES, Shot, fuzz, methods, problem_with, shot
from .rig import CANARY, House, Outcome

SEED = 20
MESSAGES = 1_500


def test_no_message_of_the_fixed_seed_is_answered_amiss(house: House) -> None:
    tally = fuzz(house, SEED, iter(range(MESSAGES)))
    assert [f"{SEED}:{finding.shot.number} {finding.what}" for finding in tally.findings] == []
    assert sum(tally.codes.values()) == MESSAGES
    # Neither all refused nor all accepted: both sides of the checks were reached.
    assert tally.codes["Generate", "OK"] > 10
    assert tally.codes["Generate", "INVALID_ARGUMENT"] > 50
    house.check_logs()


def test_a_message_is_a_function_of_seed_and_number() -> None:
    assert [shot(1, number).raw for number in range(50)] == [shot(1, number).raw for number in range(50)]
    assert shot(1, 3).raw != shot(2, 3).raw


def test_every_method_of_every_service_is_shot_at() -> None:
    shot_at = {shot(1, number).path for number in range(1_000)}
    assert shot_at == {f"/{service.full_name}/{m.name}" for service in SERVICES for m in service.methods}


def test_the_oracle_finds_what_is_amiss() -> None:
    generate = next(method for method in methods() if method.name == "Generate")
    shown = Shot(0, generate, (b"",))
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for outcome in (
        *(Outcome(grpc.StatusCode.UNKNOWN), Outcome(grpc.StatusCode.INTERNAL)),
        *(Outcome(grpc.StatusCode.UNAVAILABLE), Outcome(invalid, f"not {CANARY}")),
        *(Outcome(invalid, trailing=CANARY.encode()), Outcome(invalid, "ValueError: invalid literal")),
        Outcome(invalid, "a" * 1_000),
    ):
        assert problem_with(shown, outcome)
    assert not problem_with(shown, Outcome(invalid, "n: too many"))
