"""The benchmark of speculation: its arms on a tiny model, and how noise is told from loss."""

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
from bench.engine.speculation import CONTROL, NONE, cells_of, floors_of, grid, lines_of
from tests.unit.worker.checkpoints import shared_checkpoint


def test_a_turn_that_disturbs_all_arms_alike_changes_no_ratio() -> None:
    cells = cells_of({NONE: [10.0, 2.0, 10.0], "0.6": [15.0, 3.0, 15.0], CONTROL: [10.0, 2.0, 10.0]})
    assert (cells.control, cells.spread, cells.shares) == (1.0, 0.0, {"0.6": 1.5})
    assert [floor.floor for floor in floors_of({"8": cells})] == [0.02, 0.98]


def test_a_noisy_control_lowers_the_floor_of_its_cells_and_breaks_its_own() -> None:
    cells = cells_of({NONE: [10.0] * 3, "0": [9.7] * 3, CONTROL: [9.4] * 3})
    spread, cell = floors_of({"8": cells})
    assert cells.spread == pytest.approx(0.06)
    assert cell.value == pytest.approx(1.0)
    assert cell.floor == pytest.approx(0.92)
    assert not spread.holds


def test_a_control_that_varies_between_turns_is_noisy_though_its_median_is_not() -> None:
    cells = cells_of({NONE: [1.0] * 4, CONTROL: [0.8, 1.0, 1.0, 1.2]})
    assert cells.control == 1.0
    assert cells.spread == pytest.approx(1.86 * 0.1 / 2)


def test_a_loss_beyond_the_noise_breaks_its_floor() -> None:
    cells = cells_of({NONE: [10.0] * 3, "0": [9.6] * 3, CONTROL: [9.9] * 3})
    spread, cell = floors_of({"8": cells})
    assert spread.holds
    assert not cell.holds


@pytest.mark.filterwarnings("ignore")
def test_every_arm_is_measured_on_real_steps() -> None:
    folder = Path(shared_checkpoint("LlamaForCausalLM", vocab_size=1024, max_position_embeddings=2048))
    loaded = load_engine(
        EngineConfig(
            model=str(folder),
            kv_cache_memory=2**24,
            max_num_seqs=16,
            max_model_len=256,
            overlap_steps="off",
        )
    )
    options = Namespace(batches=[1, 3], acceptances=[0.0, 0.9], tokens=24, repeats=1)
    found = grid(loaded, options, time.perf_counter)
    assert found.keys() == {"1", "3"}
    for cells in found.values():
        assert cells.shares.keys() == {"0", "0.9"}
        assert min(cells.shares.values()) > 0
        assert cells.spread == pytest.approx(abs(cells.control - 1))
    assert lines_of(found, ()).count("\n| ") == 3


@pytest.mark.filterwarnings("ignore")
def test_every_arm_of_a_draft_model_is_measured_on_real_steps() -> None:
    sizes: dict[str, Any] = {"vocab_size": 1024, "max_position_embeddings": 2048}
    served, small = (
        Path(shared_checkpoint("LlamaForCausalLM", num_hidden_layers=layers, **sizes)) for layers in (3, 1)
    )
    config = EngineConfig(
        model=str(served),
        device="cpu",
        kv_cache_memory=2**24,
        max_num_seqs=16,
        max_model_len=256,
        overlap_steps="off",
    )
    loaded = load_engine(config)
    draft = load_draft_model(
        replace(config, draft_model=str(small)), loaded.model, loaded.tokenizer_path, torch.device("cpu")
    )
    assert draft is not None
    draft.allocate(loaded.kv_size.num_blocks, loaded.max_model_len)
    options = Namespace(batches=[1, 3], acceptances=[0.0, 0.9], tokens=24, prompt_tokens=40, repeats=1)
    found = draft_model.grid(loaded, draft.runner, config, options, time.perf_counter)
    assert found.keys() == {"1", "3"}
    for cells in found.values():
        assert cells.shares.keys() == {"0", "0.9"}
        assert min(cells.shares.values()) > 0
    text = lines_of(
        found, draft_model.about(Namespace(model="a", draft_model="b", tokens=24, prompt_tokens=40))
    )
    assert text.startswith("a with b as its draft model")
    assert text.count("\n| ") == 3
