"""Printing of answers for `generate` and `chat`: as a stream, each output whole, or as JSON.

Owns what is printed for a stream of deltas: text on stdout, statistics on stderr. Makes no calls.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict

import click
from blockyard.deploy.views import views
from blockyard.router.client import Completion, Delta, Finish


def print_stream(deltas: Iterable[Delta]) -> str:
    """Print one output as it arrives. Return its text."""
    pieces: list[str] = []
    finish = None
    try:
        for delta in deltas:
            pieces.append(delta.text)
            click.echo(delta.text, nl=False)
            finish = delta.finish
    finally:
        # An error message after a broken stream then begins on a new line.
        if pieces:
            click.echo()
    if finish is not None:
        click.echo(finish_line(finish), err=True)
    return "".join(pieces)


def print_outputs(deltas: Iterable[Delta]) -> None:
    """Print several outputs, each whole once it has ended, under its index."""
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
    score_texts = [f"{name} {score:.3f}" for name, score in scores.items() if score is not None]
    return " ".join([views.finish_line(finish), *score_texts])
