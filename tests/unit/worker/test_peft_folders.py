"""Adapter folders: what is read, what is refused by name, and what the fingerprint stands for."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.lora import peft, stored
from blockyard.worker.lora.catalogue import AdapterCatalogue
from blockyard.worker.lora.layout import slot_bytes
from blockyard.worker.lora.peft import AdapterMissing, AdapterReader
from blockyard.worker.model.config import load_config
from blockyard.worker.startup.loading import load_engine
from safetensors.torch import load_file, save_file

from .adapters import MODULES, make_adapter
from .checkpoints import shared_checkpoint

ARCHITECTURE = "LlamaForCausalLM"
Q_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def reader(folder: Path, **changes: Any) -> AdapterReader:
    model = load_config(shared_checkpoint(ARCHITECTURE))
    return AdapterReader(
        **({"folder": folder, "model": model, "max_rank": 8, "dtype": torch.float32} | changes)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_adapter(tmp_path / "a", shared_checkpoint(ARCHITECTURE), seed=1)
    return tmp_path


def change(folder: Path, **config: Any) -> None:
    file = folder / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["self_attn.q_proj", "model.lm_head"]}, "model.lm_head"),
        ({"target_modules": [7]}, "target_modules has 7"),
        ({"r": 9}, "--max-lora-rank 8"),
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": 2}, "has shape"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder: Path, config: dict[str, Any], named: str) -> None:
    change(folder, **config)
    with pytest.raises(ValueError, match=named):
        reader(folder).read("a")


def test_options_that_are_off_or_only_trained_with_are_accepted(folder: Path) -> None:
    before = reader(folder).read("a")
    change(
        folder,
        use_dora=False,
        rank_pattern={},
        modules_to_save=None,
        lora_dropout=0.1,
        base_model_name_or_path="x",
        an_option_of_tomorrow=None,
    )
    assert reader(folder).read("a").fingerprint == before.fingerprint


@pytest.mark.parametrize(
    "named",
    ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj", ["self_attn.q_proj", "model.layers.0.mlp.up_proj"]],
)
def test_targets_may_be_a_pattern_or_ends_of_longer_names(folder: Path, named: object) -> None:
    before = reader(folder).read("a")
    change(folder, target_modules=named)
    assert reader(folder).read("a").fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({Q_NAME: torch.zeros(4, 63)}, "has shape"),
        ({Q_NAME: torch.zeros(4, 64, dtype=torch.int8)}, "I8"),
        ({Q_NAME: torch.full((4, 64), float("inf"))}, "not finite"),
        ({Q_NAME: None}, "one half"),
        ({Q_NAME: None, Q_NAME.replace("lora_A", "lora_B"): None}, "lacks q_proj"),
        ({Q_NAME.replace("layers.0", "layers.00"): torch.zeros(4, 64)}, "layers.00"),
        ({Q_NAME.replace("layers.0", "layers.3"): torch.zeros(4, 64)}, "layers.3"),
        ({Q_NAME.replace("layers.0", "layers." + "9" * 5000): torch.zeros(4, 64)}, "none of this model's"),
        ({Q_NAME.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(4)}, "magnitude"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "lm_head"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    folder: Path, tensors: dict[str, torch.Tensor | None], named: str
) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    changed = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    save_file(changed, file)
    with pytest.raises(ValueError, match=named):
        reader(folder).read("a")


def test_a_scale_that_takes_numbers_out_of_their_type_is_refused(folder: Path) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    save_file({name: tensor.sign() for name, tensor in load_file(file).items()}, file)
    change(folder, lora_alpha=10**6)
    reader(folder).read("a")
    with pytest.raises(ValueError, match=r"lora_B.*out of torch.float16"):
        reader(folder, dtype=torch.float16).read("a")


def test_a_header_that_claims_too_much_allocates_nothing(folder: Path) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    for data in (b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match="safetensors"):
            reader(folder).read("a")
    for text in ("[]", "{", "[" * 100_000, " " * (1 << 20) + "{}"):
        (folder / "a" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            reader(folder).read("a")


def header_of(*names: str, **entry: Any) -> bytes:
    """Return a safetensors file of tensors without data, or as `entry` says."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | entry
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(("num_names", "most_parsed"), [(500, 43), (20_000, 0)])
def test_no_more_names_are_read_than_the_model_has_places_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_names: int, most_parsed: int
) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    names = [Q_NAME, *(f"x{number}" for number in range(num_names))]
    file.write_bytes(header_of(*names, shape=[4, 64]))
    parsed: list[Any] = []
    entry = stored._entry
    monkeypatch.setattr(stored, "_entry", lambda one: parsed.append(one) or entry(one))
    with pytest.raises(ValueError, match=r"header has more than \d+ bytes|'x0' is none of this model's"):
        reader(folder).read("a")
    assert len(parsed) <= most_parsed


@pytest.mark.parametrize(
    "content",
    [
        header_of(Q_NAME, shape=[4, 64], data_offsets=[0, 1024]),
        header_of(Q_NAME, shape=[4, 64], data_offsets=[0, 1023]) + bytes(1023),
        header_of(Q_NAME, shape=[4, 64], data_offsets=[1, 1025]) + bytes(1025),
        header_of(Q_NAME, Q_NAME.replace("lora_A", "lora_B"), shape=[4, 64], data_offsets=[0, 1024])
        + bytes(1024),
        header_of(Q_NAME, shape=[4, 64], data_offsets=[-1024, 0]) + bytes(1024),
        header_of(Q_NAME, shape=[4, 64], data_offsets=[0, 10**400]) + bytes(1024),
        header_of(Q_NAME, shape=[[4], 64]),
        header_of(Q_NAME, shape="ab"),
        header_of(Q_NAME, dtype=["F32"]),
        header_of(Q_NAME, data_offsets=[0]),
        header_of(Q_NAME, shape=[1] * 5000),
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"\xff\xff\xff",
        (9000).to_bytes(8, "little") + b"[" * 9000,
    ],
    ids=range(14),
)
def test_a_header_that_lies_about_its_data_is_refused(folder: Path, content: bytes) -> None:
    (folder / "a" / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a readable|data do not|has shape|one half"):
        reader(folder).read("a")


def test_data_behind_the_last_tensor_are_refused_and_not_read(folder: Path) -> None:
    file = folder / "a" / "adapter_model.safetensors"
    os.truncate(file, 1 << 42)
    with pytest.raises(ValueError, match="do not end where the file does"):
        reader(folder).read("a")


def test_a_file_that_becomes_a_pipe_or_a_device_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ValueError, match="is no regular file"):
            stored.open_regular(path)


def test_no_path_leaves_the_adapter_folder(folder: Path) -> None:
    make_adapter(folder / "inner" / "b", shared_checkpoint(ARCHITECTURE), seed=2)
    inside = reader(folder / "inner")
    inside.read("b")
    os.symlink(folder / "a", folder / "inner" / "link")
    os.mkdir(folder / "inner" / "half")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.symlink(folder / "a" / name, folder / "inner" / "half" / name)
    for path in ("../a", str(folder / "a"), "link", "half", "", ".", "b/../../a", "\0"):
        with pytest.raises(ValueError, match="adapter folder"):
            inside.read(path)
    os.mkdir(folder / "inner" / "empty")
    for path in ("none", "empty", "b/adapter_config.json"):
        with pytest.raises(AdapterMissing):
            inside.read(path)


def test_the_fingerprint_is_that_of_the_content(folder: Path) -> None:
    checkpoint = shared_checkpoint(ARCHITECTURE)
    first = reader(folder).read("a").fingerprint
    make_adapter(folder / "same", checkpoint, seed=1)
    others = {"b": {"seed": 2}, "c": {"seed": 1, "alpha": 9}, "d": {"seed": 1, "use_rslora": True}}
    others["e"] = {"seed": 1, "modules": tuple(MODULES)[:3]}
    assert reader(folder).read("same").fingerprint == first
    assert reader(folder, dtype=torch.bfloat16).read("a").fingerprint == first
    found = {first}
    for name, options in others.items():
        make_adapter(folder / name, checkpoint, **options)  # type: ignore[arg-type]
        found.add(reader(folder).read(name).fingerprint)
    assert len(found) == 1 + len(others)


def test_equal_content_is_one_adapter_and_an_unchanged_folder_is_not_read_again(folder: Path) -> None:
    make_adapter(folder / "same", shared_checkpoint(ARCHITECTURE), seed=1)
    make_adapter(folder / "other", shared_checkpoint(ARCHITECTURE), seed=2)
    catalogue = AdapterCatalogue(reader(folder))
    first = catalogue.add("one", "a")[0].adapter
    assert catalogue.add("one", "a")[0].adapter is first
    assert catalogue.add("two", "same") == (catalogue.all()[1], "")
    assert catalogue.all()[1].adapter is first
    replaced, unnamed = catalogue.add("one", "other")
    assert (replaced.adapter is first, unnamed) == (False, "")
    assert catalogue.remove("two") == first.fingerprint
    with pytest.raises(KeyError):
        catalogue.remove("two")
    assert [named.name for named in catalogue.all()] == ["one"]


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="--adapter-dir"):
        EngineConfig(model="m", max_loras=2)
    with pytest.raises(ValueError, match="adapter_dir must be a full path, not 'adapters'"):
        EngineConfig(model="m", max_loras=2, adapter_dir="adapters")


def test_a_worker_does_not_start_without_its_adapter_folder(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(shared_checkpoint(ARCHITECTURE)),
        device="cpu",
        max_loras=1,
        adapter_dir=str(tmp_path / "gone"),
    )
    with pytest.raises(ValueError, match="gone' is no folder on this worker's machine"):
        load_engine(config)


def test_a_slot_has_the_bytes_of_an_adapter_of_the_largest_rank(folder: Path) -> None:
    adapter = reader(folder).read("a")
    model = load_config(shared_checkpoint(ARCHITECTURE))
    assert slot_bytes(model, adapter.rank, 4) == adapter.num_bytes


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.",
            MemoryError,
            r"^no host memory for the adapter$",
        ),
        ("CUDA error: out of memory", MemoryError, r"^no host memory for the adapter$"),
        ("CUDA error: an illegal memory access was encountered", RuntimeError, "illegal memory access"),
    ],
)
def test_no_host_memory_for_an_adapter_is_a_memory_error_and_nothing_else_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: type[Exception], told: str
) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(error, match=told):
        reader(folder).read("a")


def test_pytorch_still_says_so_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 46)
    assert any(words in str(caught.value) for words in peft._NO_MEMORY)


def test_a_part_of_a_fused_layer_is_not_changed_twice(tmp_path: Path) -> None:
    checkpoint = shared_checkpoint("Phi3ForCausalLM")
    make_adapter(tmp_path / "a", checkpoint, seed=1, modules=("qkv_proj",))
    read = reader(tmp_path, model=load_config(checkpoint)).read
    assert isinstance(weights := read("a").weights, dict)
    assert weights.keys() == {"qkv"}
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file(load_file(file) | {Q_NAME: torch.zeros(4, 64)}, file)
    with pytest.raises(ValueError, match="are for the same layer"):
        read("a")


def test_a_fused_layer_that_the_model_does_not_have_is_missed(folder: Path) -> None:
    change(folder, target_modules=["qkv_proj"])
    with pytest.raises(ValueError, match="layer 0 lacks qkv_proj"):
        reader(folder).read("a")
