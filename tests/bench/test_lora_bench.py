"""The benchmark of adapters on a tiny model: every arm runs, and adapters are used."""

from pathlib import Path

import pytest

from bench.lora import ARMS, Batch, engines_of, floors_of, measure, rows_of
from tests.worker.checkpoints import shared_checkpoint


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_every_arm_is_measured_beside_the_same_batch_without_adapters() -> None:
    folder = Path(shared_checkpoint("LlamaForCausalLM", vocab_size=1024, max_position_embeddings=2048))
    engines, adapters = engines_of(folder, "float32", 2, "cpu")
    batch = Batch(sequences=9, prompt_tokens=8, output_tokens=3)
    rates = measure(engines, adapters, batch, 2)
    assert rates.keys() == ARMS.keys()
    assert all(len(one.decode) == len(one.prefill) == 2 and min(one.decode) > 0 for one in rates.values())
    assert len(engines["adapters"].load().adapters) == len(adapters) == 8
    assert len(floors_of("x", rates)) == 4
    assert len(rows_of("x", rates)) == 3
