"""Every file of a model that names an end token counts, for the router and for workers alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import blockyard.deploy
import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.router.tokenizing.model_facts import read_facts
from blockyard.worker.model.config import load_config
from transformers import PreTrainedTokenizerBase

DEMO = Path(blockyard.deploy.__file__).parent / "demo_model" / "checkpoint"
BASE_END, TURN_END = 0, 2
"""Ids of <|endoftext|> and <|im_end|>, which the tokenizer names."""
MISSING: Any = object()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEMO)


def folder_with(tmp_path: Path, **files: dict[str, Any]) -> Path:
    """Copy the demo model without its weights, and set fields of its JSON files. MISSING takes a field away."""
    folder = Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    for name, fields in files.items():
        file = folder / f"{name}.json"
        content = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not MISSING}))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (BASE_END, BASE_END, {BASE_END, TURN_END}),
        ([BASE_END], [BASE_END], {BASE_END, TURN_END}),
        ([BASE_END, 7], MISSING, {BASE_END, TURN_END, 7}),
        (BASE_END, 7, {BASE_END, TURN_END, 7}),
        (MISSING, [7, 8], {TURN_END, 7, 8}),
        (None, BASE_END, {BASE_END, TURN_END}),
        (None, None, {TURN_END}),
        (MISSING, MISSING, {TURN_END}),
        ([], [10**9, -1], {TURN_END}),
    ],
)
def test_an_answer_ends_at_every_end_token_that_a_file_names(tmp_path, tokenizer, generation, config, ends):
    folder = folder_with(
        tmp_path, generation_config={"eos_token_id": generation}, config={"eos_token_id": config}
    )
    facts = read_facts(folder, names=("m",), tokenizer=tokenizer)
    assert facts.eos_token_ids == load_config(folder).eos_token_ids == ends


def test_a_worker_finds_the_tokenizers_end_token_however_it_is_spelled(tmp_path: Path) -> None:
    nothing, spelled = {"eos_token_id": None}, {"content": "<|im_end|>"}
    for number, named in enumerate(
        ({"eos_token": spelled}, {"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": spelled}})
    ):
        files = {"generation_config": nothing, "config": nothing, "tokenizer_config": named}
        folder = folder_with(tmp_path / str(number), **files)
        assert load_config(folder).eos_token_ids == {TURN_END}
        (folder / "tokenizer_config.json").write_text("{}")
        assert load_config(folder).eos_token_ids == set()
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        assert load_config(folder).eos_token_ids == {TURN_END}


def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for number, named in enumerate(("</s>", [True], {"id": 2}, 1.5)):
        folder = folder_with(tmp_path / str(number), config={"eos_token_id": named})
        for read in (load_config, lambda one: read_facts(one, names=("m",), tokenizer=tokenizer)):
            with pytest.raises(ValueError, match="eos_token_id"):
                read(folder)
