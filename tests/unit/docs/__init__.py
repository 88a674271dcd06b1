"""Documents and examples, checked against the product."""
