"""The benches that run within one process, on tiny models: every arm is measured."""

import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.startup.draft_model import load_draft_model
from blockyard.worker.startup.loading import load_engine

from bench.engine import draft_model
from bench.engine.speculation import grid, lines_of
from bench.lora import ARMS, Batch, engines_of, floors_of, measure, rows_of
from tests.unit.worker.checkpoints import shared_checkpoint

SIZES: dict[str, Any] = {"vocab_size": 1024, "max_position_embeddings": 2048}
pytestmark = pytest.mark.filterwarnings("ignore")


def test_adapters_are_measured_beside_the_same_batch_without_them() -> None:
    folder, orders = Path(shared_checkpoint("LlamaForCausalLM", **SIZES)), []
    for slots_first in (False, True):
        engines, adapters = engines_of(folder, "float32", 2, "cpu", slots_first=slots_first)
        rates = measure(engines, adapters, Batch(sequences=9, prompt_tokens=8, output_tokens=3), 2)
        assert rates.keys() == ARMS.keys()
        assert all(len(one.decode) == len(one.prefill) == 2 and min(one.decode) > 0 for one in rates.values())
        assert len(engines["adapters"].load().adapters) == len(adapters) == 8
        assert engines["none"] is not engines["slots"] is engines["adapters"]
        orders.append(rates)
    assert (len(floors_of("x", orders)), len(rows_of("x", orders))) == (4, 3)


@pytest.mark.parametrize("has_draft", [False, True])
def test_speculation_is_measured_on_real_steps(has_draft: bool) -> None:
    served, small = (
        shared_checkpoint("LlamaForCausalLM", num_hidden_layers=layers, **SIZES) for layers in (2, 1)
    )
    limits: dict[str, Any] = {"kv_cache_memory": 2**24, "max_num_seqs": 16, "max_model_len": 256}
    config = EngineConfig(model=str(served), device="cpu", overlap_steps="off", **limits)
    loaded, options = (
        load_engine(config),
        Namespace(batches=[1, 3], acceptances=[0.0, 0.9], tokens=12, repeats=1),
    )
    about: tuple[str, ...] = ()
    if has_draft:
        drafting = replace(config, draft_model=str(small))
        draft = load_draft_model(drafting, loaded.model, loaded.tokenizer_path, torch.device("cpu"))
        assert draft is not None
        draft.allocate(loaded.kv_size.num_blocks, loaded.max_model_len)
        options.prompt_tokens = 40
        found = draft_model.grid(loaded, draft.runner, config, options, time.perf_counter)
        about = draft_model.about(Namespace(model="a", draft_model="b", tokens=12, prompt_tokens=40))
    else:
        found = grid(loaded, options, time.perf_counter)
    assert found.keys() == {"1", "3"}
    for cells in found.values():
        assert cells.shares.keys() == {"0", "0.9"}
        assert min(cells.shares.values()) > 0
        assert has_draft or cells.spread == pytest.approx(abs(cells.control - 1))
    text = lines_of(found, about)
    assert text.count("\n| ") == 3
    assert text.startswith("a with b as its draft model") == has_draft
