"""Structured output: compiles grammars in a separate process, and fills masks of the tokens that may follow.

Does not own how masks reach the logits (../execution/).

`llguidance` was chosen over `xgrammar`, which compiles ahead of time. At a vocabulary of 128k tokens `maxLength: 10^9`
took 4.6 s there and 0.5 ms here. It also ignored keywords (`not`, `if`) that `llguidance` refuses. A matcher is always
built by following the output's tokens: after a preemption, on another worker, and at a fork. JSON has at most one
character of whitespace between tokens, because small models else fill `max_tokens` with it.
"""
