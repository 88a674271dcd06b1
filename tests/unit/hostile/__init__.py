"""Bad input of every kind: each is refused in words and changes nothing else."""
