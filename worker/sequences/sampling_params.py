"""Sampling parameters of a request as the engine takes them, with their bounds. Pure data."""

from dataclasses import dataclass
from typing import Literal

from blockyard.proto.limits import MAX_LOGIT_BIAS, RANGES

GREEDY_BELOW_TEMPERATURE = 1e-5
EarlyStopping = Literal["heuristic", "first", "never"]
"""When a beam search with enough finished beams ends.

"heuristic": once the running beams are unlikely to be better (transformers' False). "first": at once (True). "never":
only when they cannot be better.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, with every default filled in.

    Stop strings are not here: they are text, and are checked where tokens become text. Raises ValueError for a value
    outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Least probability of a kept token, as a share of the most probable token's."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that are already in the prompt or the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the number that is added to its logit."""
    allowed_token_ids: frozenset[int] = frozenset()
    """Only these tokens may be sampled. Empty: all."""
    bad_token_ids: frozenset[int] = frozenset()
    """These tokens are never sampled."""
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    """Empty means ignore_eos."""
    n: int = 1
    """Number of outputs: sampled independently, or the best of the beams."""
    beam_width: int = 0
    """0 samples. Otherwise a beam search, which is greedy: it ignores temperature and seed, and takes no filters."""
    length_penalty: float = 1.0
    """Beams are ranked by cumulative logprob / generated tokens ** length_penalty."""
    early_stopping: EarlyStopping = "heuristic"
    logprobs: int | None = None
    """Number of most probable tokens to report beside each sampled one. 0: only its own. None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed whole."""
    embeds: bool = False
    """Return the prompt's embedding, and no token: `max_tokens` is 0. The prompt's last token is always computed."""

    def __post_init__(self) -> None:
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            # The scheduler refuses a request whose tokens do not fit, and names that reason.
            if name != "max_tokens" and value is not None:
                _check_range(name, value, *bounds)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        reports = self.logprobs is not None or self.prompt_logprobs is not None
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.embeds and (self.max_tokens or self.n > 1 or self.beam_width or reports):
            raise ValueError("an embedding takes no max_tokens, outputs, beams or logprobs")
        if self.max_tokens < 1 and not self.embeds:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be from 0 to max_tokens {self.max_tokens}, not {self.min_tokens}"
            )
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.beam_width < 0 or (self.beam_width and self.n > self.beam_width):
            raise ValueError(f"beam_width must be 0 or at least n {self.n}, not {self.beam_width}")
        filters = self.top_k or self.top_p < 1.0 or self.min_p
        chooses = self.logit_bias or self.allowed_token_ids or self.bad_token_ids or self.penalises
        if self.beam_width and (filters or chooses or reports):
            raise ValueError("a beam search takes no filters, penalties, biases, token lists or logprobs")

    @property
    def max_results(self) -> int:
        """Most results of an output: its tokens, or one embedding."""
        return 1 if self.embeds else self.max_tokens

    @property
    def takes_largest(self) -> bool:
        """Whether the token is that of the model's largest logit, and the request asks for nothing else of the
        logits."""
        return (
            self.temperature < GREEDY_BELOW_TEMPERATURE
            and self.n == 1
            and not (self.beam_width or self.min_tokens or self.penalises)
            and not (self.logit_bias or self.allowed_token_ids or self.bad_token_ids)
            and self.logprobs is None
        )

    @property
    def penalises(self) -> bool:
        """Whether any penalty makes the choice depend on earlier tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _check_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, not {value}")
