"""All mutants of the fault matrix (mutant.py), in order of its rows."""

from . import (
    mutants_index,
    mutants_processes,
    mutants_ranks,
    mutants_requests,
    mutants_transfers,
    mutants_workers,
)

MUTANTS = (
    *mutants_requests.MUTANTS,
    *mutants_workers.MUTANTS,
    *mutants_index.MUTANTS,
    *mutants_processes.MUTANTS,
    *mutants_transfers.MUTANTS,
    *mutants_ranks.MUTANTS,
)

NOT_TRIED = {
    29: "starts Ray and takes a minute",
    33: "starts two nodes of Ray and takes a minute",
}
"""Rows for which no failing test has been seen, and the reason."""
