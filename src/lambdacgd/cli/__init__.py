"""The command line: ``lambdacgd plan | compare | epsilon | check | audit | verify | demo``.

Bad input is one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lambdacgd.errors import InvalidInput, LedgerError, TrainingError

# What optional packages come with.
_EXTRAS = {"transformers": "hf"} | dict.fromkeys(("matplotlib", "PIL", "opacus"), "reproduce")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from lambdacgd.cli.app import command

    arguments = sys.argv[1:] if argv is None else argv
    return guarded(command(arguments), arguments, program="lambdacgd")


def guarded(command: Callable[..., Any], argv: Sequence[str] | None, *, program: str) -> int:
    """Call a command tree of typer and return its exit code; bad input becomes one line on stderr, by ``program``."""
    try:
        result = command(args=list(sys.argv[1:] if argv is None else argv), prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except InvalidInput as error:
        from lambdacgd.cli.options import flag_of

        said = error.complaint.replace("noise_multiplier", "--noise-multiplier").replace(" epsilon ", " --epsilon ")
        flag = flag_of(error.parameter)
        whole = said.startswith(": ") and not flag.startswith("-")  # a sentence of what was named without a flag
        return _complain(program, said[2:] if whole else flag + said)
    except (ValueError, TrainingError, LedgerError) as error:
        return _complain(program, str(error))
    except BrokenPipeError:  # who reads us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(program, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        if (error.name or "lambdacgd").partition(".")[0] == "lambdacgd":
            raise
        what = "install lambdacgd with all it depends on"
        if extra := _EXTRAS.get(str(error.name).partition(".")[0]):
            what = f"the extra {extra} brings it: pip install '.[{extra}]' in a checkout of lambdacgd"
        return _complain(program, f"{error.name} is not installed here: {what}")
    except MemoryError as error:
        return _complain(program, f"this does not fit into memory ({error})")
    except Exception as error:
        # typer brings its own click, so its exceptions are known by what they offer rather than by class.
        if type(error).__name__ == "Abort":
            return 130
        if not hasattr(error, "format_message"):
            raise
        return _complain(program, error.format_message(), code=getattr(error, "exit_code", 2))


def _complain(program: str, message: str, *, code: int = 2) -> int:
    if message.strip():  # asked for no command at all, typer has printed its help
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code


def entry() -> None:
    """The console script.

    It works with one thread, unless ``OMP_NUM_THREADS`` says otherwise: accountants multiply small matrices, and on a
    busy machine BLAS threads that wait for each other take many times longer than one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
