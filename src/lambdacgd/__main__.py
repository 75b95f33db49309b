"""``python -m lambdacgd`` is the command ``lambdacgd``."""

from lambdacgd.cli import entry

if __name__ == "__main__":
    entry()
