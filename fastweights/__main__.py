"""`python -m fastweights` is the command `fastweights`."""

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command; Ctrl-C ends it with one line even while it is being imported."""
    try:
        from .cli import main as run
        from .safe_path import safe_children

        with safe_children():
            return run()
    except KeyboardInterrupt:
        print("fastweights: error: stopped", file=sys.stderr)
        return 130


def _leave_current_folder() -> str | None:
    """Take the current folder off the path, where `python -m` has put it: files there named torch.py or json.py are not ours.

    Returns:
        Why the command cannot run: this package was found in the current folder, and another one is installed, which the
        processes of the command would use.
    """
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    try:
        here = os.getcwd()
    except OSError:  # it was deleted, and is not on the path
        return None
    if sys.path[0] not in ("", here):
        return None
    del sys.path[0]
    package = os.path.dirname(__file__)
    specs = (finder.find_spec("fastweights", None) for finder in sys.meta_path)
    installed = next((os.path.dirname(spec.origin) for spec in specs if spec and spec.origin), None)
    if installed is None:  # a checkout that is not installed: packages that are, and Python's own modules, come first
        sys.path.append(os.path.dirname(package))
    elif not os.path.samefile(installed, package):
        return (
            f"python -m has found fastweights in the current folder, and another one is installed in {installed}; run the "
            "command fastweights, start in another folder, or install this one with pip install -e ."
        )
    return None


if __name__ == "__main__":
    refusal = _leave_current_folder()  # before anything else is imported
    if refusal is not None:
        print(f"fastweights: error: {refusal}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
