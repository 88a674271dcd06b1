"""How long a step of decodes alone takes, by about how many they are. Pure."""


class DecodeTimes:
    """A step reads the weights once for all of its decodes, so that sixteen take far less than sixteen times what one
    takes: a rate of tokens would not tell. Steps are told apart by the power of two below their number of decodes."""

    def __init__(self, *, smoothing: float) -> None:
        """`smoothing` is the weight of the newest step, above 0 and at most 1."""
        self._smoothing = smoothing
        self._seconds: dict[int, float] = {}
        """Of a number's bit length."""

    def observe(self, decodes: int, seconds: float) -> None:
        """A step of `decodes` sequences, one at least, and no prompt."""
        size = decodes.bit_length()
        old = self._seconds.get(size, seconds)
        self._seconds[size] = old + self._smoothing * (seconds - old)

    def expected(self, decodes: int) -> float:
        """Seconds; 0.0 before any step was seen. Where no step of about so many was, the geometric mean of what it
        takes at the least (as long as fewer) and at the most (as much longer as they are more)."""
        if not self._seconds:
            return 0.0
        size = decodes.bit_length()
        nearest = max((known for known in self._seconds if known <= size), default=min(self._seconds))
        return self._seconds[nearest] * float(2 ** ((size - nearest) / 2))
