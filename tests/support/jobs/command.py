"""The command line, as a script: python tests/support/jobs/command.py train ..."""

from evenstep.cli import main

if __name__ == "__main__":
    main()
