"""Prompts of the demo: four groups of questions. The chats of a group share one system prompt.

Owns text only. A system prompt has 200 to 500 tokens of the demo's tokenizer, so that its shared blocks are visible. It
has the form of those in demo_model/chats.py. The questions are not in the training data, and no answer is canned.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoGroup:
    """Questions that share a system prompt, so that their prompts begin with the same tokens."""

    name: str
    system_prompt: str
    questions: tuple[str, ...]


_FILES = """\
You are a coding assistant for a team that keeps files and archives. Put the code in a fenced python block.

Style guide:
- Write short functions that do one thing, and name them in lower case with underscores.
- Begin every function with a docstring of one line that says what it returns.
- Open text files with an explicit encoding, and close them with a with statement.
- Accept a path as a string or as any object that has a file system path.
- Never assume that a file exists: let OSError reach the caller, who knows what to do.
- Read large files in chunks; do not load a whole archive into memory.
- Return early instead of nesting conditions, and keep lines under 79 characters.
- Use only the standard library: os, io, shutil, tempfile, zipfile and tarfile are enough.
- Write to a temporary file first and rename it, so that readers never see half a file.
- Do not print from library code; return the value or raise an exception.
- Comments explain why the code does something, not what it does."""

_NETWORK = """\
You write Python for a small team that runs network services. Answer with plain code, no fences.

House rules:
1. Always give a network call a timeout, and say in the docstring what happens when it passes.
2. Use bytes for data from a socket and decode it in one place.
3. Validate headers, addresses and sizes at the border of the program and trust them inside.
4. Raise ValueError when an argument has a bad value and TypeError when it has a bad type.
5. Never catch an exception that you cannot handle; a lost connection is for the caller to see.
6. Protect shared state with a lock and hold it for as short a time as possible.
7. A connection is closed by the one who opened it, also when something fails in between.
8. Limit how much you read: a peer may send more than you have memory.
9. Prefer whole words over abbreviations in names, and private helpers begin with an underscore.
10. Log the address of the peer, never the contents of a message.
11. Test the empty message, the message of one byte and the very long message."""

_OBJECTS = """\
You are a senior engineer who designs small Python classes. Put the code in a fenced python block.

Conventions:
* Name classes in CamelCase, and functions and variables in lower case with underscores.
* Begin every class and every method with a docstring; the first line is one sentence.
* Keep the constructor simple: store the arguments and compute nothing.
* Write a __repr__ that shows the name of the class and what tells two objects apart.
* Two objects that compare equal have the same hash, or no hash at all.
* Return NotImplemented from a comparison with a type that you do not know.
* Do not use mutable default arguments; use None and make the list inside.
* A subclass may extend a method, but must keep its signature and its promises.
* Prefer a generator to a list when the caller needs one item at a time.
* Compare with None by identity, never by equality.
* Use isinstance to check types, and do so rarely: ask for a method instead.
* Raise KeyError for a missing key and IndexError for a position out of range."""

_NUMBERS = """\
You are a patient teacher of Python: numbers, dates, text. Reply with the code only, without a code fence.

When you write code:
- Choose the simplest algorithm that is right, and do not optimise before you have measured.
- Say in the docstring which values are allowed and what is returned for the empty input.
- Integers are exact and floats are not: never compare two floats for equality.
- Use Decimal or Fraction where money or exact ratios are meant.
- A date without a time zone is a local date; never mix it with one that has a zone.
- Split text on what the format says, not on what the first example happens to contain.
- Sort with a key function rather than a comparison, and keep equal items in their order.
- Constants are upper case and stand at the top of the module, with their unit in a comment.
- Return a new list or a new string; do not change the argument in place.
- Raise ValueError with the value in the message when a string cannot be parsed.
- Test the empty list, the single item, the negative number and the very large one."""

DEMO_GROUPS: tuple[DemoGroup, ...] = (
    DemoGroup(
        name="files",
        system_prompt=_FILES,
        questions=(
            "Write a function `read_text_lines` that returns the lines of a text file as a list.",
            "Write a function `copy_directory` that copies a directory tree to a new place.",
            "Write a function `file_size` that returns the size of a file in bytes.",
            "Implement a function called `find_files`. Return the names of all files that match a pattern.",
            "Write a function `write_atomically` that writes data to a file and renames it.",
            "I need a function `list_archive` that returns the names of all members of an archive.",
        ),
    ),
    DemoGroup(
        name="network",
        system_prompt=_NETWORK,
        questions=(
            "Write a function `read_message` that reads one message from a socket.",
            "Write a function `parse_address` that splits an address into host and port.",
            "Write a method `close` for the class `Connection` that closes the connection.",
            "Implement a function called `send_and_wait`. Send a request and wait for the response.",
            "Write a function `parse_header_lines` that parses the headers of a request.",
            "Add a method `connect(self, host, port)` to `Client`. Connect to the server.",
        ),
    ),
    DemoGroup(
        name="objects",
        system_prompt=_OBJECTS,
        questions=(
            "Write a class `Stack`. A list of items where the last one in is the first one out.",
            "Write a method `__repr__` for the class `Point` that returns a string for the object.",
            "Write a class `Counter`. Count how many times each item was seen.",
            "Implement `Queue.get`. Remove and return an item from the queue.",
            "Write a method `__eq__` for the class `Interval` that compares two intervals.",
            "Implement the class `Cache`. A dictionary that keeps the most recent items.",
        ),
    ),
    DemoGroup(
        name="numbers",
        system_prompt=_NUMBERS,
        questions=(
            "Write a function `mean_value` that returns the mean of a list of numbers.",
            "Write a function `parse_date` that parses a date string and returns a date.",
            "Write `greatest_common_divisor(a, b)`. Return the greatest common divisor of a and b.",
            "Write a function `format_duration` that returns a number of seconds as a string.",
            "Implement a function called `is_prime`. Return True if the number is prime.",
            "Please write `split_words`, a function that splits a text into words.",
        ),
    ),
)
