"""`python -m loadgen` is the `slobench` command."""

from loadgen.cli.main import main

if __name__ == "__main__":
    main()
