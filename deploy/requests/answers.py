"""How `generate` and `chat` show what the model answers: as it comes, each output whole, or as JSON.

Owns what is printed of a stream of deltas: text on stdout, how it went on stderr. Asks nobody.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict

import click
from blockyard.deploy.views import views
from blockyard.router.client import Completion, Delta, Finish


def print_stream(deltas: Iterable[Delta]) -> str:
    """One output, as it comes. Returns its text."""
    pieces: list[str] = []
    finish = None
    try:
        for delta in deltas:
            pieces.append(delta.text)
            click.echo(delta.text, nl=False)
            finish = delta.finish
    finally:
        # However the stream ends, what is said next stands on a line of its own.
        if pieces:
            click.echo()
    if finish is not None:
        click.echo(finish_line(finish), err=True)
    return "".join(pieces)


def print_outputs(deltas: Iterable[Delta]) -> None:
    """Several outputs: each whole once it has ended, under its index."""
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        texts.setdefault(delta.index, []).append(delta.text)
        if delta.finish is not None:
            click.echo(f"--- output {delta.index}")
            click.echo("".join(texts.pop(delta.index)))
            click.echo(finish_line(delta.finish), err=True)


def print_json(completion: Completion) -> None:
    click.echo(json.dumps(asdict(completion), indent=2))


def finish_line(finish: Finish) -> str:
    scores = {"logprob": finish.cumulative_logprob, "score": finish.beam_score}
    told = [f"{name} {score:.3f}" for name, score in scores.items() if score is not None]
    return " ".join([views.finish_line(finish), *told])
