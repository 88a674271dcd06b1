"""Chats for training, made from corpus definitions: a system prompt, then questions answered by real source.

Owns the wording of questions and the form of a chat. Every answer is text of the corpus. The demo's own prompts
(demo/prompts.py) are not used. Does not know tokens or models.
"""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from .corpus import Corpus, Definition


class Message(NamedTuple):
    role: Literal["system", "user", "assistant"]
    content: str


Chat = list[Message]

_PERSONAS = (
    "You are a careful Python programmer.",
    "You are a coding assistant for the Python standard library.",
    "You are a senior engineer who answers with code.",
    "You write Python for a small platform team.",
    "You help the maintainers of a large Python code base.",
    "You are a patient teacher of Python.",
    "You review and write Python modules.",
)
_FENCED = ("Put the code in a fenced python block.", "Answer with one fenced code block.")
_PLAIN = ("Answer with plain code, no fences.", "Reply with the code only, without a code fence.")
_RULES_HEADINGS = (
    "House rules:",
    "Style guide:",
    "Follow these rules:",
    "When you write code:",
    "Conventions:",
)
_RULES = (
    "Write short functions that do one thing.",
    "Begin every function with a docstring of one line.",
    "Use four spaces for each level of indentation.",
    "Keep lines under 79 characters.",
    "Prefer whole words over abbreviations in names.",
    "Name functions and variables in lower case with underscores, and classes in CamelCase.",
    "Raise ValueError when an argument has a bad value and TypeError when it has a bad type.",
    "Never catch an exception that you cannot handle.",
    "Close files with a with statement.",
    "Return early instead of nesting conditions.",
    "Do not use mutable default arguments.",
    "Use only the standard library.",
    "Compare with None by identity, never by equality.",
    "Open text files with an explicit encoding.",
    "Prefer a generator to a list when the caller needs one item at a time.",
    "Do not print from library code; return the value or log it.",
    "Comments explain why the code does something, not what it does.",
    "Avoid global state; pass what a function needs as arguments.",
    "Protect shared state with a lock and hold it for as short a time as possible.",
    "Validate input at the border of the program and trust it inside.",
    "Constants are upper case and stand at the top of the module.",
    "Private helpers begin with an underscore.",
    "Imports come first: standard library, then third party, then local modules.",
    "Use isinstance to check types, and do so rarely.",
    "Always give a network call a timeout.",
    "Use bytes for data from a socket and decode it in one place.",
    "Sort with a key function rather than a comparison.",
    "Test the empty input, the single item and the very long input.",
    "Do not optimise before you have measured.",
    "A subclass may extend a method, but must keep its signature.",
    "If the question is unclear, choose the simplest meaning.",
    "Do not explain the code unless you are asked to.",
)
_FUNCTION_QUESTIONS = (
    "Write a function `{name}` that {does}.",
    "Write a Python function `{name}` that {does}.",
    "Write `{name}({arguments})`. {summary}",
    "Implement a function called `{name}`. {summary}",
    "Please write `{name}`, a function that {does}.",
    "I need a function `{name}` that {does}.",
    "Show me a function `{name}`.",
)
_METHOD_QUESTIONS = (
    "Write a method `{name}` for the class `{owner}` that {does}.",
    "Implement `{owner}.{name}`. {summary}",
    "Add a method `{name}({arguments})` to `{owner}`. {summary}",
    "Show me the method `{name}` of `{owner}`.",
)
_CLASS_QUESTIONS = (
    "Write a class `{name}`. {summary}",
    "Implement the class `{name}`. {summary}",
    "Show me a class `{name}`.",
)
_DOCUMENT_QUESTIONS = (
    "Document the {kind} `{name}`.",
    "What does `{name}` do?",
    "Write a docstring for the {kind} `{name}`.",
)
_CONTINUE_QUESTIONS = (
    "Continue this code:\n{code}",
    "Complete this function:\n{code}",
    "Finish this:\n{code}",
)
_TOPIC_QUESTIONS = ("Explain {topic} in Python.", "What does the reference say about {topic}?")

_THIRD_PERSON = {"be": "is", "do": "does", "have": "has", "go": "goes", "try": "tries", "apply": "applies"}
_NOT_VERBS = frozenset(
    {
        "a",
        "an",
        "the",
        "this",
        "these",
        "some",
        "like",
        "same",
        "internal",
        "helper",
        "utility",
        "true",
        "false",
    }
    | {"class", "base", "abstract", "common", "default", "function", "method", "launcher", "one"}
)
_NOT_VERB_ENDINGS = ("ed", "ing", "tion")
_MAX_CONTENT_CHARACTERS = 1600


class ChatMaker:
    """An endless source of chats from one corpus. The same `rng` state gives the same chats."""

    def __init__(self, corpus: Corpus, rng: Random) -> None:
        self._rng = rng
        self._topics = corpus.topics
        self._headers = list(corpus.headers.values())
        functions = [d for d in corpus.definitions if d.kind == "function"]
        # The demo asks mostly for functions, and there are fewer of them, so they are repeated.
        described = [d for d in functions if d.summary]
        self._definitions = [*corpus.definitions, *functions, *described, *described]

    def next_chat(self) -> Chat:
        """Return a chat of one to three questions, with a long, a short or no system prompt."""
        fenced = self._rng.random() < 0.5
        chat = self._system_prompt(fenced)
        if not chat:
            fenced = True
        for _ in range(self._rng.choice((1, 2, 3))):
            chat += self._exchange(fenced)
        return chat

    def _system_prompt(self, fenced: bool) -> Chat:
        shape = self._rng.choices(("none", "short", "rules", "module"), weights=(20, 25, 40, 15))[0]
        if shape == "none":
            return []
        opening = f"{self._rng.choice(_PERSONAS)} {self._rng.choice(_FENCED if fenced else _PLAIN)}"
        if shape == "short":
            return [Message("system", opening)]
        if shape == "module":
            header = self._rng.choice(self._headers)[:_MAX_CONTENT_CHARACTERS]
            return [
                Message("system", f"{opening}\n\nYou work in a module that begins like this:\n\n{header}")
            ]
        rules = self._rng.sample(_RULES, self._rng.randint(6, 18))
        mark = self._rng.choice(("- ", "* ", "{number}. "))
        lines = [mark.format(number=number) + rule for number, rule in enumerate(rules, start=1)]
        return [Message("system", "\n".join((opening, "", self._rng.choice(_RULES_HEADINGS), *lines)))]

    def _exchange(self, fenced: bool) -> Chat:
        task = self._rng.choices(("write", "continue", "document", "topic"), weights=(74, 12, 10, 4))[0]
        if task == "topic":
            topic, text = self._rng.choice(self._topics)
            question = self._rng.choice(_TOPIC_QUESTIONS).format(topic=topic)
            return _exchange(question, "\n\n".join(text.split("\n\n")[:3]))
        definition = self._rng.choice(self._definitions)
        if task == "document" and definition.docstring:
            question = self._rng.choice(_DOCUMENT_QUESTIONS)
            return _exchange(
                question.format(kind=definition.kind, name=definition.name), definition.docstring
            )
        if task == "continue":
            lines = definition.source.splitlines()
            cut = self._rng.randint(1, len(lines) - 1)
            question = self._rng.choice(_CONTINUE_QUESTIONS).format(code=_code(lines[:cut], fenced))
            return _exchange(question, _code(lines[cut:], fenced))
        return _exchange(self._question(definition), _code(definition.source.splitlines(), fenced))

    def _question(self, definition: Definition) -> str:
        wordings = {"function": _FUNCTION_QUESTIONS, "method": _METHOD_QUESTIONS, "class": _CLASS_QUESTIONS}
        does = describe_action(definition.summary)
        usable = [
            wording
            for wording in wordings[definition.kind]
            if ("{does}" not in wording or does) and ("{summary}" not in wording or definition.summary)
        ]
        return self._rng.choice(usable).format(
            name=definition.name,
            owner=definition.owner,
            arguments=definition.arguments,
            summary=definition.summary,
            does=does,
        )


def describe_action(summary: str) -> str:
    """Turn `Return the x.` into `returns the x`, for use after "that". Empty if no verb seems to come first."""
    first, _, rest = summary.split(". ")[0].rstrip(".").partition(" ")
    verb = first.lower()
    if (
        not rest
        or not first.isalpha()
        or first.isupper()
        or verb in _NOT_VERBS
        or verb.endswith(_NOT_VERB_ENDINGS)
    ):
        return ""
    if verb.endswith("s") and not verb.endswith("ss"):
        return f"{verb} {rest}"
    ending = "es" if verb.endswith(("ss", "sh", "ch", "x")) else "s"
    return f"{_THIRD_PERSON.get(verb, verb + ending)} {rest}"


def _exchange(question: str, answer: str) -> Chat:
    return [
        Message("user", question[:_MAX_CONTENT_CHARACTERS]),
        Message("assistant", answer[:_MAX_CONTENT_CHARACTERS]),
    ]


def _code(lines: list[str], fenced: bool) -> str:
    code = "\n".join(lines)
    return f"```python\n{code}\n```" if fenced else code
