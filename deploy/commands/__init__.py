"""The commands of `blockyard`, by kind; cli.py gathers them."""
