"""The command line: ``lambdacgd plan | compare | …``. Bad input is one line and exit code 2, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lambdacgd.validation import InvalidInput

# Parameters whose flag is not simply their name with dashes.
_FLAGS = {"lam": "--lambda", "name": "NAME", "task": "TASK"}
# What optional packages come with.
_EXTRAS = {"sklearn": "train", "PIL": "train", "tensorboard": "train", "opacus": "bench", "transformers": "hf"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from lambdacgd.cli.app import command

    try:
        result = command()(
            args=list(sys.argv[1:] if argv is None else argv), prog_name="lambdacgd", standalone_mode=False
        )
        return result if isinstance(result, int) else 0
    except InvalidInput as error:
        flag = _FLAGS.get(error.parameter, "--" + error.parameter.replace("_", "-"))
        return _complain(f"{flag}{error.complaint}")
    except ValueError as error:
        return _complain(str(error))
    except BrokenPipeError:  # who reads us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        if (error.name or "lambdacgd").partition(".")[0] == "lambdacgd":
            raise
        extra = _EXTRAS.get(str(error.name).partition(".")[0])
        what = f"pip install 'lambdacgd[{extra}]'" if extra else "install lambdacgd with all it depends on"
        return _complain(f"{error.name} is not installed here: {what}")
    except MemoryError as error:
        return _complain(f"this does not fit into memory ({error})")
    except Exception as error:
        # typer brings its own click, so its exceptions are known by what they offer rather than by class.
        if type(error).__name__ == "Abort":
            return 130
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), code=getattr(error, "exit_code", 2))


def _complain(message: str, *, code: int = 2) -> int:
    if message.strip():  # asked for no command at all, typer has printed its help
        print(f"lambdacgd: {' '.join(message.split())}", file=sys.stderr)
    return code


def entry() -> None:
    """The console script."""
    sys.exit(main())
