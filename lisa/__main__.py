"""python -m lisa: the same as the `lisa` command."""

from lisa.cli import main

main()
