"""The benchmark of adapters on a tiny model: every arm runs, and adapters are used."""

from pathlib import Path

import pytest

from bench.lora import ARMS, Batch, Rates, engines_of, floors_of, measure, ratio, rows_of
from tests.unit.worker.checkpoints import shared_checkpoint


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_every_arm_is_measured_beside_the_same_batch_without_adapters() -> None:
    folder = Path(shared_checkpoint("LlamaForCausalLM", vocab_size=1024, max_position_embeddings=2048))
    orders = []
    for slots_first in (False, True):
        engines, adapters = engines_of(folder, "float32", 2, "cpu", slots_first=slots_first)
        rates = measure(engines, adapters, Batch(sequences=9, prompt_tokens=8, output_tokens=3), 2)
        assert rates.keys() == ARMS.keys()
        assert all(len(one.decode) == len(one.prefill) == 2 and min(one.decode) > 0 for one in rates.values())
        assert len(engines["adapters"].load().adapters) == len(adapters) == 8
        assert engines["none"] is not engines["slots"] is engines["adapters"]
        orders.append(rates)
    assert len(floors_of("x", orders)) == 4
    assert len(rows_of("x", orders)) == 3


def test_a_ratio_is_the_geometric_mean_of_both_orders() -> None:
    orders = [
        {arm: Rates(decode=[rate, 2 * rate], prefill=[1.0, 1.0]) for arm, rate in rates.items()}
        for rates in (
            {"none": 1.0, "slots": 1.0, "adapters": 0.8},
            {"none": 1.0, "slots": 1.0, "adapters": 1.25},
        )
    ]
    assert ratio(orders, "adapters", "decode") == pytest.approx(1.0)
    assert ratio(orders[:1], "adapters", "decode") == pytest.approx(0.8)
