"""Division of a model among ranks: the sizes of each part, and where it lies in the tensors of a checkpoint.

Query heads, kv heads, the inner rows of each MLP or expert and the vocabulary are divided. Each rank has the norms and
the gates of experts whole. Inner rows and vocabulary are padded with zeros where they do not divide. Where there are
more ranks than kv heads, several ranks have the same kv head. Pure: no tensors.
"""

from dataclasses import dataclass, replace

from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.quantisation.stored import check_division
from blockyard.worker.model.shards import tensor_shapes

PADDED_TO = 8
"""Rows and columns of a part are a multiple of this: 16 bytes in bfloat16, as matrix multiplications read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The part of a model that one rank has."""

    whole: ModelConfig
    config: ModelConfig
    """The sizes of the part. Its `vocab_size` and both `intermediate_size` count padding."""
    rank: int
    size: int

    @property
    def first_token(self) -> int:
        """Return the first token of the rank's part of the vocabulary."""
        return self.rank * self.config.vocab_size

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the rank's part of the vocabulary, without padding."""
        return max(0, min(self.config.vocab_size, self.whole.vocab_size - self.first_token))

    def place(self, name: str) -> tuple[slice, ...] | None:
        """Return where the part lies in a tensor of a checkpoint. None for a tensor that this rank does without.

        A slice may be shorter than the part, which is then padded.
        """
        part, kind = self.config, name.rsplit(".", 2)[-2:]
        inner = self._inner_rows(name)
        width, kv_width = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
        kv_start = self.rank * self.whole.num_kv_heads // self.size * part.head_dim
        match kind:
            case ["embed_tokens" | "lm_head", _]:
                return (_run(self.rank, part.vocab_size, self.whole.vocab_size),)
            case ["q_proj", _]:
                return (slice(self.rank * width, (self.rank + 1) * width),)
            case ["k_proj" | "v_proj", _]:
                return (slice(kv_start, kv_start + kv_width),)
            case ["o_proj", "weight"]:
                return slice(None), slice(self.rank * width, (self.rank + 1) * width)
            case ["o_proj", "bias"]:
                return (slice(None),) if self.rank == 0 else None
            case ["gate_proj" | "up_proj", _]:
                return (inner,)
            case ["down_proj", _]:
                return slice(None), inner
        return (slice(None),)

    def _inner_rows(self, name: str) -> slice:
        """Return the part's inner rows of an MLP, by the name of one of its tensors."""
        part, whole = (_inner_rows(config, name) for config in (self.config, self.whole))
        return _run(self.rank, part, whole)


def _inner_rows(config: ModelConfig, name: str) -> int:
    if config.mixture is not None and ".experts." in name:
        return config.mixture.intermediate_size
    if config.mixture is not None and ".shared_expert." in name:
        return config.mixture.shared_rows
    return config.intermediate_size


def divide(config: ModelConfig, rank: int = 0, size: int = 1) -> ModelPart:
    """Return what one of `size` ranks has of a model. Raises ValueError for heads that do not divide."""
    if size == 1:
        return ModelPart(whole=config, config=config, rank=0, size=1)
    if config.whole_qk_norm:
        raise ValueError(
            f"a {config.architecture} is not divided among ranks: it normalises the queries of all heads together"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        raise ValueError(f"{heads} query heads do not divide among {size} ranks: each needs the same number")
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{kv_heads} kv heads do not divide among {size} ranks: one of the two numbers must divide the other"
        )
    mixture = config.mixture
    if mixture is not None:
        mixture = replace(
            mixture,
            intermediate_size=_padded_share(mixture.intermediate_size, size),
            shared_rows=_padded_share(mixture.shared_rows, size),
        )
    part = replace(
        config,
        mixture=mixture,
        num_heads=heads // size,
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=_padded_share(config.intermediate_size, size),
        vocab_size=_padded_share(config.vocab_size, size),
        # Added once: the sum over all ranks follows.
        attention_out_bias=config.attention_out_bias and rank == 0,
    )
    check_division(config.quantisation, tensor_shapes(config), tensor_shapes(part), size)
    return ModelPart(whole=config, config=part, rank=rank, size=size)


def _padded_share(total: int, size: int) -> int:
    return -(-total // (size * PADDED_TO)) * PADDED_TO


def _run(rank: int, share: int, total: int) -> slice:
    return slice(min(rank * share, total), min((rank + 1) * share, total))
