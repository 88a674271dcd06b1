"""Text that is decoded piece by piece equals text that is decoded whole."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import blockyard.deploy
import pytest
from blockyard.proto.text import IncrementalDetokenizer, StopChecker, load_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.properties import examples

DEMO_CHECKPOINT = Path(blockyard.deploy.__file__).parent / "demo_model" / "checkpoint"


@cache
def byte_level() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEMO_CHECKPOINT)


@cache
def sentencepiece_like() -> PreTrainedTokenizerBase:
    """Return a tokenizer like Llama 2's: a space before each word, one stripped at the start, bytes for the unknown."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcde", "ab", "▁a"]
    bpe = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("a", "b"), ("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def streamed(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The deltas of tokens pushed in groups of `sizes`, over and over."""
    detokenizer, deltas, start = IncrementalDetokenizer(tokenizer), [], 0
    while start < len(token_ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.finish()]


def whole(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


group_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
# Ids 3-258 are the single bytes, half of them no character on their own; 0-2 are special; 5000 is no token.
byte_level_ids = st.lists(st.one_of(st.integers(0, 258), st.integers(0, 4095), st.just(5000)), max_size=60)


@given(byte_level_ids, group_sizes)
@examples(400, deadline=None)
def test_byte_level_deltas_add_up_to_the_whole_decoding(token_ids: list[int], sizes: list[int]) -> None:
    assert "".join(streamed(byte_level(), token_ids, sizes)) == whole(byte_level(), token_ids)


@given(st.text(max_size=40), group_sizes)
@settings(deadline=None)
def test_a_delta_never_splits_a_character(text: str, sizes: list[int]) -> None:
    token_ids = byte_level()(text).input_ids
    # U+FFFD appears only as the user's own.
    deltas = streamed(byte_level(), token_ids, sizes)
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


word_or_bytes = st.one_of(st.text(alphabet=" abcdeé€😀", max_size=6), st.sampled_from([" ", "  a", "</s>"]))


@given(st.lists(word_or_bytes, max_size=12), group_sizes)
@examples(300, deadline=None)
def test_sentencepiece_deltas_keep_every_space(texts: list[str], sizes: list[int]) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [
        token_id for text in texts for token_id in tokenizer(text, add_special_tokens=False).input_ids
    ]
    assert "".join(streamed(tokenizer, token_ids, sizes)) == whole(tokenizer, token_ids)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_a_character_of_four_tokens_appears_with_its_last(make: Callable[[], PreTrainedTokenizerBase]):
    tokenizer = make()
    names = ["ð", "Ł", "ĺ", "Ģ"] if make is byte_level else ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([tokenizer.convert_tokens_to_ids(name)]) for name in names] == ["", "", "", "😀"]


@pytest.mark.parametrize(
    ("make", "token"), [(byte_level, "ÿ"), (byte_level, None), (sentencepiece_like, "<0xFF>")]
)
def test_a_long_output_or_endless_garbage_is_decoded_in_a_bounded_window(make, token):
    tokenizer, text, widths = make(), "", []
    if token is None:
        token_ids = tokenizer("def f(x):\n    return x + 1\n" * 200).input_ids
    else:
        token_ids = [tokenizer.convert_tokens_to_ids(token)] * 1000
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in token_ids:
        text += detokenizer.push([token_id])
        widths.append(len(detokenizer._window))
    assert max(widths) <= (4 if token is None else 65)
    assert text + detokenizer.finish() == whole(tokenizer, token_ids)


def cut_by_find(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition that StopChecker keeps: the earliest occurrence in the whole text, then list order."""
    found = [(text.find(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    start, index = min(found)
    return text[:start], stops[index]


def cut_by_checker(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None]:
    checker, safe, matched = StopChecker(stops), "", None
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(bounds):
        emitted, matched = checker.push(text[start:end])
        safe += emitted
        if matched:
            return safe, matched
    emitted, matched = checker.finish()
    return safe + emitted, matched


@given(
    st.text(alphabet="ab\n", max_size=30),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=30),
)
@examples(1000, deadline=None)
def test_a_stop_string_cuts_where_find_says_however_the_text_is_split(text, stops, cuts):
    assert cut_by_checker(text, stops, cuts) == cut_by_find(text, stops)


@pytest.mark.parametrize(
    ("stops", "pushes", "end"),
    [
        (
            ["</answer>"],
            [
                ("1 < 2", "1 < 2", None),
                (" and <", " and ", None),
                ("/ans", "", None),
                ("were>", "</answere>", None),
                ("x</answer>y", "x", "</answer>"),
                ("z", "", "</answer>"),
            ],
            ("", "</answer>"),
        ),
        (["abcd", "bc"], [("xabc", "x", None), ("e", "a", "bc")], ("", "bc")),
        ([], [("any", "any", None)], ("", None)),
    ],
    ids=["one", "overlapping", "none"],
)
def test_only_text_that_may_begin_a_stop_string_is_held_back(stops, pushes, end):
    checker = StopChecker(stops)
    assert [(text, *checker.push(text)) for text, _, _ in pushes] == pushes
    assert checker.finish() == end
    with pytest.raises(ValueError, match="must not be empty"):
        StopChecker([*stops, ""])
