"""Tests of every folder; the folders below mirror the product's."""
