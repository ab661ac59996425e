"""`python -m farandole` is the command line. Imported instead, it has loaded what reading a command line loads: so does
the process that workers are forked from, half of whose CPU time that would be.
"""

from farandole.cli import main, read_ahead

if __name__ == "__main__":
    main()
else:
    read_ahead()
