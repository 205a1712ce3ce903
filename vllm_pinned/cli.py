# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pinned`."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_pinned import __version__, show, wheel, write
from vllm_pinned.edits import load_edits
from vllm_pinned.errors import BadInput
from vllm_pinned.survey import State, changes, refuse_drift, survey
from vllm_pinned.target import Target, resolve

DEFAULT_RELEASE = "0.33.0"
INTERRUPTED = 128 + signal.SIGINT  # as shells have it
LOOK = "`vllm-pinned status` says where the tree stands"
EPILOG = """\
TARGET is nothing (the vLLM installed beside this command), a folder (source checkout,
unpacked wheel, site-packages), a wheel file, or a release such as 0.33.0.

exit status: 0 all is well; 1 an edit is needed (status, diff); 2 bad input or drift,
and nothing was changed
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-pinned",
        description="Put the edits of this fork into a vLLM.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=help,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    status = command(
        "status", "say which edits the vLLM needs, has, or has drifted from"
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    command("diff", "print the needed edits as a unified diff")
    command("apply", "make the needed edits in a folder, in place")
    command("revert", "put back the files that apply changed")
    pack = command("wheel", "write a wheel with the edits, and their diff")
    pack.add_argument("--out", type=Path, default=Path(), help="folder (default: here)")
    mail = command("series", "write one mail patch for each needed edit")
    mail.add_argument("folder", type=Path, metavar="DIR")
    for each in commands.choices.values():
        each.add_argument("target", nargs="?", metavar="TARGET")
    pack.set_defaults(target=DEFAULT_RELEASE)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    _take_any_output()
    arguments = _parser().parse_args(argv)
    try:
        target = resolve(arguments.target)
        with write.locked(target) if target.is_folder else contextlib.nullcontext():
            result = COMMANDS[arguments.command](target, arguments)
        sys.stdout.flush()
        return result
    except BadInput as error:
        print(f"vllm-pinned: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _drop_output()
        print(f"vllm-pinned: interrupted; {LOOK}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return 2
    except OSError as error:
        _drop_output()
        print(f"vllm-pinned: {_unusable(error)}", file=sys.stderr)
        return 2


def _take_any_output() -> None:
    """Let every character be printed, and anything where an output is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Keep Python from writing at exit what could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unusable(error: OSError) -> str:
    if error.filename is None:
        what = "reading a file or writing the output failed"
        return f"{what} ({error.strerror}); mend that, {LOOK}"
    advice = "mend that path or give another"
    if isinstance(error, PermissionError):
        advice = "run as a user who may"
    return f"cannot read {error.filename} ({error.strerror}); {advice}"


def _status(target: Target, arguments: argparse.Namespace) -> int:
    findings = survey(target.read, load_edits())
    applied = write.read_manifest(target)["edits"] if target.is_folder else []
    if arguments.json:
        print(show.as_json(target, findings, applied))
    else:
        show.table(target, findings, applied)
    refuse_drift(findings)
    return int(any(f.state is State.NEEDED for f in findings))


def _diff(target: Target, _: argparse.Namespace) -> int:
    new = changes(target.read, survey(target.read, load_edits()))
    sys.stdout.buffer.write(show.diff(target.read, new))
    return int(bool(new))


def _apply(target: Target, _: argparse.Namespace) -> int:
    _require_folder(target, "apply")
    findings = survey(target.read, load_edits())
    new = changes(target.read, findings)
    needed = [f.edit.id for f in findings if f.state is State.NEEDED]
    if new:
        write.apply(target, new, needed)
        print(f"applied to {target}: {', '.join(needed)}")
    else:
        print(f"nothing to apply: {target} needs no edit")
    return 0


def _revert(target: Target, _: argparse.Namespace) -> int:
    _require_folder(target, "revert")
    paths = write.revert(target)
    if paths:
        print(f"reverted in {target}: {', '.join(paths)}")
    else:
        print(f"nothing to revert: vllm-pinned has applied nothing to {target}")
    return 0


def _require_folder(target: Target, command: str) -> None:
    if not target.is_folder:
        raise BadInput(
            f"{command} works on a folder in place, and {target.path} is a wheel; "
            "use `vllm-pinned wheel`, or give the folder where vLLM is installed"
        )


def _wheel(target: Target, arguments: argparse.Namespace) -> int:
    if target.is_folder:
        raise BadInput(
            f"wheel takes a release or a wheel file, and {target.path} is a folder; "
            "use `vllm-pinned apply` there"
        )
    new = changes(target.read, survey(target.read, load_edits()))
    if not new:
        print(f"no wheel written: {target} needs no edit, use it as it is")
        return 0
    patch = show.diff(target.read, new)
    print(*wheel.pack(target, new, patch, arguments.out), sep="\n")
    return 0


def _series(target: Target, arguments: argparse.Namespace) -> int:
    findings = survey(target.read, load_edits())
    changes(target.read, findings)  # the same checks as apply
    patches = show.series(target.read, findings, show.git_author())
    if not patches:
        print(f"no patch written: {target} needs no edit")
        return 0
    show.write_series(arguments.folder, patches)
    print(*(arguments.folder / name for name in patches), sep="\n")
    print("apply them with: git am --keep-non-patch", arguments.folder / "*.patch")
    return 0


COMMANDS: dict[str, Callable[[Target, argparse.Namespace], int]] = {
    "status": _status,
    "diff": _diff,
    "apply": _apply,
    "revert": _revert,
    "wheel": _wheel,
    "series": _series,
}
