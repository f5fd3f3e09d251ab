"""The secret of a run: whoever knows it is a process of the run, and nobody else is believed.

The first host makes it. The others get it through a file that only the user can read, or through
the environment, which other users cannot read either. It is never an argument: every user sees the
arguments of all processes.
"""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from planner.errors import InputError
from planner.formats.files import check_regular

SECRET_VARIABLE = "PLAN_SECRET"  # the secret itself
FILE_VARIABLE = "PLAN_SECRET_FILE"  # a file that holds it
LEAST_CHARACTERS = 32
_MADE_CHARACTERS = 64
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(_MADE_CHARACTERS // 2)


def run_secret() -> bytes | None:
    """Return the secret that the environment gives or names; None where it does neither.

    Raise InputError for a secret that is too short, and for a file that others can read.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text is None and (path := os.environ.get(FILE_VARIABLE)):
        text = secret_in(Path(path))
        os.environ[SECRET_VARIABLE] = text
    if text is None:
        return None

    _check_length(text, SECRET_VARIABLE)
    return text.encode()


def secret_of_hosts(path: Path) -> str:
    """Return the secret of a run on several hosts: that of the environment, or else that of the
    file at `path`.
    """
    secret = run_secret()
    if secret is None:
        return secret_in(path)
    return secret.decode()


def default_file(run: str, rendezvous: str) -> Path:
    """Return where the hosts of a run that meet at `rendezvous` keep its secret.

    In the user's home, which the hosts of a cluster usually share.
    """
    place = rendezvous.replace(os.sep, "-")
    try:
        return Path.home() / ".planner" / f"secret-{run}-{place}"
    except RuntimeError:
        hint = (
            f"name a file with `secret_file`, or set {SECRET_VARIABLE} to the same text on "
            f"all hosts"
        )
        raise InputError(
            "there is no home folder to keep the secret of the run in", hint=hint
        ) from None


def secret_in(path: Path) -> str:
    """Return the secret in a file of this user's; whoever comes first makes the file.

    Raise InputError where the file cannot be made or read, belongs to another user, or can be read
    by others.
    """
    try:
        check_regular(path)
        if not path.exists():
            _make(path)
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as cause:
        hint = (
            f"name another file with `secret_file`, or set {SECRET_VARIABLE} to the same text "
            f"on all hosts"
        )
        raise InputError(
            f"the secret of the run cannot be kept in '{path}': {cause}", hint=hint
        ) from cause

    if status.st_uid != os.geteuid():
        raise InputError(
            f"'{path}' belongs to another user, who knows the secret", hint="name another file"
        )

    if status.st_mode & _OTHERS:
        raise InputError(f"other users can read the secret in '{path}'", hint=f"chmod 600 {path}")
    _check_length(text, str(path))
    return text


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # for this user alone
    descriptor, written = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{new_secret()}\n")
        # A link, because it fails where another host was faster, whose secret then counts, and is
        # whole when it shows.
        os.link(written, path)
    except FileExistsError:
        pass
    finally:
        Path(written).unlink()


def _check_length(text: str, place: str) -> None:
    if len(text) < LEAST_CHARACTERS:
        hint = f"give it {LEAST_CHARACTERS} characters or more, as from: openssl rand -hex 32"
        raise InputError(
            f"the secret in {place} has {len(text)} characters, which can be guessed", hint=hint
        )
