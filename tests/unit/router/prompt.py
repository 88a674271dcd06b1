"""A prompt of 30 full blocks, and a clock that stands still until the test moves it."""

NAMES = [bytes([number]) * 16 for number in range(30)]
PROMPT_TOKENS = 30 * 16 + 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
