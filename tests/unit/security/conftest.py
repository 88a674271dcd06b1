"""Tokens of each role, in the file that a router reads."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blockyard.router.admission.token_entries import new_token

PEOPLE = {
    "ann": ("user", "acme"),
    "amy": ("user", "acme"),
    "bob": ("user", "bravo"),
    "vic": ("viewer", "acme"),
    "ada": ("admin", "ops"),
}
"""Role and tenant by name."""


@dataclass(slots=True)
class Tokens:
    """`of[name]` is a token; `write` puts the entries into the file."""

    path: Path
    of: dict[str, str] = field(default_factory=dict)
    entries: list[dict[str, str]] = field(default_factory=list)

    def add(self, name: str, role: str, tenant: str | None = None) -> None:
        self.of[name], entry = new_token(name, role, tenant)
        self.entries.append(entry)

    def write(self) -> None:
        self.path.touch(mode=0o600)
        self.path.write_text(json.dumps(self.entries))

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.of[name]}"),)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    made = Tokens(tmp_path_factory.mktemp("auth") / "tokens.json")
    for name, (role, tenant) in PEOPLE.items():
        made.add(name, role, tenant)
    made.write()
    return made
