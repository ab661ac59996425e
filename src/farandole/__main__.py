"""`python -m farandole` is the command line."""

from farandole.cli import main

if __name__ == "__main__":
    main()
