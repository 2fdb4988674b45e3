"""`python -m fivefold`: the same as the `fivefold` command."""

from fivefold.cli.main import main

main()
