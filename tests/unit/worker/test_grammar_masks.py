"""A mask depends only on a sequence's tokens, and an error in one row does not affect other rows."""

import logging
from collections.abc import Iterator

import pytest
import torch
from blockyard.worker.grammar import compiled as library
from blockyard.worker.grammar.compiled import CompiledGrammar
from blockyard.worker.grammar.masks import Masks
from blockyard.worker.sequences.identifiers import SequenceId

from .grammars import DEMO_TOKENS, PERSON, allowed, demo_source, draw_output, regex, row_of, schema

END_TOKENS = {0, 2}


@pytest.fixture
def masks() -> Iterator[Masks]:
    masks = Masks(DEMO_TOKENS)
    yield masks
    masks.close()


def compiled_of(grammar: library.Grammar, *, vocab_size: int = DEMO_TOKENS) -> CompiledGrammar:
    return CompiledGrammar(grammar, demo_source(vocab_size=vocab_size).load())


def tokens_of(text: str) -> list[int]:
    return list(demo_source().load().tokenize_str(text))


def test_a_replay_from_any_prefix_gives_the_masks_of_going_along(masks: Masks) -> None:
    person = compiled_of(schema(PERSON))
    output = draw_output(person, demo_source(), seed=3)
    assert output is not None
    going_along = [allowed(masks, [row_of(person, output[:end])])[0] for end in range(len(output) + 1)]
    assert going_along[-1] == END_TOKENS
    assert not any(END_TOKENS & choice for choice in going_along[:-1])
    fresh = compiled_of(schema(PERSON))
    for end in range(0, len(output) + 1, 7):
        assert allowed(masks, [row_of(fresh, output[:end], sequence_id=100 + end)]) == [going_along[end]]


def test_a_sequence_whose_tokens_have_changed_is_followed_anew(masks: Masks) -> None:
    words = compiled_of(regex("aaab|bbba"))
    assert allowed(masks, [row_of(words, tokens_of("aaa"))]) == [set(tokens_of("b"))]
    assert allowed(masks, [row_of(words, tokens_of("bbb"))]) == [set(tokens_of("a"))]
    shorter = allowed(masks, [row_of(words, tokens_of("b"))])
    assert shorter == allowed(masks, [row_of(words, tokens_of("b"), sequence_id=2)])


def test_the_tokens_of_the_prompt_are_no_part_of_the_output(masks: Masks) -> None:
    assert set(tokens_of("a")) <= allowed(masks, [row_of(compiled_of(regex("a+")))])[0]


def test_rows_without_a_grammar_and_the_order_of_rows_stay(masks: Masks) -> None:
    digits, letters = compiled_of(regex("[0-9]")), compiled_of(regex("[a-z]"))
    rows = [
        row_of(None),
        row_of(digits, sequence_id=2),
        row_of(None, sequence_id=3),
        row_of(letters, sequence_id=4),
    ]
    logits_SV = torch.randn(4, DEMO_TOKENS)
    before_SV = logits_SV.clone()
    masks.start(rows)
    masks.apply(logits_SV, rows)
    assert torch.equal(logits_SV[[0, 2]], before_SV[[0, 2]])
    for row, characters in ((1, "0123456789"), (3, "abcdefghijklmnopqrstuvwxyz")):
        kept_V = torch.isfinite(logits_SV[row])
        assert {tokens_of(char)[0] for char in characters} == set(kept_V.nonzero().flatten().tolist())
        assert torch.equal(logits_SV[row, kept_V], before_SV[row, kept_V])


def test_special_tokens_and_logits_beyond_the_vocabulary_are_never_allowed() -> None:
    masks = Masks(4133)
    anything = compiled_of(regex("(?s:.)*"), vocab_size=4133)
    (choice,) = allowed(masks, [row_of(anything)], 4133)
    assert max(choice) < DEMO_TOKENS
    assert 1 not in choice, "a message's start is no text"
    assert choice >= END_TOKENS
    assert allowed(masks, [row_of(anything)], 4300) == [choice]
    masks.close()


def test_a_row_that_forks_has_one_mask_and_its_forks_follow_their_own_tokens(masks: Masks) -> None:
    words = compiled_of(regex("ab|cd"))
    (choice,) = allowed(masks, [row_of(words, num_outputs=2)])
    assert set(tokens_of("a") + tokens_of("c")) <= choice
    forks = [row_of(words, tokens_of("a")), row_of(words, tokens_of("c"), sequence_id=2)]
    assert allowed(masks, forks) == [set(tokens_of("b")), set(tokens_of("d"))]


def test_after_its_end_an_output_has_end_tokens_only(masks: Masks) -> None:
    word = compiled_of(regex("ab"))
    assert allowed(masks, [row_of(word, tokens_of("ab"))]) == [END_TOKENS]
    for ends in ([2], [2, 0], [2, 0, 2]):
        assert allowed(masks, [row_of(word, [*tokens_of("ab"), *ends])]) == [END_TOKENS]
        assert allowed(masks, [row_of(word, [*tokens_of("ab"), *ends], sequence_id=2)]) == [END_TOKENS]
        masks.forget([SequenceId(2)])
    assert allowed(masks, [row_of(word, [*tokens_of("ab"), 2, *tokens_of("a")])]) == [set()]


def test_an_output_that_does_not_follow_its_grammar_fails_alone_and_is_not_quoted(
    masks: Masks, caplog: pytest.LogCaptureFixture
) -> None:
    word = compiled_of(regex("secret"))
    rows = [row_of(word, tokens_of("sec")), row_of(word, tokens_of("public"), sequence_id=2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            good, bad = allowed(masks, rows)
            assert (good, bad) == ({tokens_of("ret")[0]}, set())
    assert [record.getMessage() for record in caplog.records] == [
        f"sequence 2 does not follow its grammar after {len(tokens_of('public'))} tokens"
    ]


@pytest.mark.parametrize("token", [-1, 4096, 2**31 - 1])
def test_a_token_that_is_none_does_not_raise(masks: Masks, token: int) -> None:
    rows = [row_of(compiled_of(regex("a+")), [token]), row_of(compiled_of(regex("b")), sequence_id=2)]
    assert allowed(masks, rows) == [set(), set(tokens_of("b"))]


def test_a_grammar_whose_states_are_used_up_is_built_anew(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_LEXER_STATES", 600)
    wide = compiled_of(regex("(.*a.{20}|.*b.{20}|.*c.{20})"))
    output = list[int]()
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        (choice,) = allowed(masks, [row_of(wide, output)])
        assert choice, f"failed after {len(output)} tokens"
        going_on = sorted(choice - END_TOKENS)
        output.append(going_on[int(torch.randint(len(going_on), (), generator=generator))])
    assert wide.generation > 0


def test_what_is_forgotten_is_gone_and_comes_back_by_replay(masks: Masks) -> None:
    word = compiled_of(regex("abcdef"))
    row = row_of(word, tokens_of("abc"))
    before = allowed(masks, [row])
    masks.forget([row.sequence.sequence_id, SequenceId(99)])
    assert not masks._followers
    assert allowed(masks, [row]) == before


def test_masks_of_a_step_that_failed_do_not_meet_the_next_one(masks: Masks) -> None:
    first, second = row_of(compiled_of(regex("a"))), row_of(compiled_of(regex("b")), sequence_id=2)
    masks.start([first, second])
    assert allowed(masks, [second]) == [set(tokens_of("b"))]
    masks.start([first])
    masks.forget([first.sequence.sequence_id])
    logits_SV = torch.zeros(1, DEMO_TOKENS)
    masks.start([row_of(None)])
    masks.apply(logits_SV, [row_of(None)])
    assert torch.equal(logits_SV, torch.zeros(1, DEMO_TOKENS))


def test_rows_of_drafts_get_the_masks_of_sequences_with_these_tokens(masks: Masks) -> None:
    words = compiled_of(regex("a{2,4}b"))
    base = row_of(words, tokens_of("a"))
    guessed = tokens_of("a") * 2 + tokens_of("b") + tokens_of("a")
    drafts = [
        base._replace(start=base.start + number, drafts=tuple(guessed[:number]))
        for number in range(1, 1 + len(guessed))
    ]
    found = allowed(masks, [base, *drafts])
    committed = [
        allowed(masks, [row_of(words, tokens_of("a") + guessed[:number], sequence_id=9 + number)])[0]
        for number in range(len(guessed))
    ]
    assert found[:-1] == committed
    assert not found[-1], "a draft that breaks the grammar allows nothing behind it"
    assert allowed(masks, [row_of(words, tokens_of("aab"))]) == [END_TOKENS], "the output itself is as before"
