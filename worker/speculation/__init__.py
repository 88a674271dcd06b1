"""Speculation: which next tokens are guessed, and how many of them a step verifies.

A step computes guessed tokens (drafts) of a sequence beside its newest token, each as a row of its own. The model draws
the token after each of them as it always does. Drafts that equal the tokens drawn save steps, the others cost rows.

Pure, but for the steps of a draft model, which its runner computes. Does not own rows, blocks or the comparison
(scheduling/drafts.py, scheduling/commit.py).

Drafts are not verified as chunks of a prompt, since other kernels compute those and near ties might give other tokens.
With overlapping steps the next one is planned only after the commit where drafts are expected to gain.
"""
