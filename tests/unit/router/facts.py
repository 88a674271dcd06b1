"""A model small enough to reach every bound."""

from blockyard.router.tokenizing.model_facts import ModelFacts

FACTS = ModelFacts(
    names=("tiny",),
    vocab_size=1000,
    max_position_embeddings=128,
    eos_token_ids=frozenset({2, 0}),
    longest_token_bytes=10,
)
