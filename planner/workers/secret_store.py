"""A store whose values are believed only when a process of the run wrote them.

PyTorch's store asks nobody who he is. Whoever reaches its port can read, write and delete. So what
this package writes there carries an HMAC by the secret of the run (RFC 2104), and nothing is parsed
before its HMAC was checked:

    key                 "planner/" + HMAC(names, key)
    value               HMAC(values, hashed key + text) + text

Keys are hashed, so that nobody can make one before its writer does: that a key is there is a
message, too. The HMAC of a value includes its key, so no value can be moved to another key.
Counters are values like all others.

Whoever reaches the port can still delete a value, or put back an earlier one of the same key: that
can make a run hang or fail, and says so in docs/threat-model.md.
"""

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from pydantic import ValidationError

# PyTorch exports both by a star import.
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from planner.errors import WorkerError
from planner.formats.files import Record
from planner.workers.secret import SECRET_VARIABLE, run_secret

_HASH = "sha256"
_CHARACTERS = 64  # of an HMAC in hexadecimal
RecordT = TypeVar("RecordT", bound=Record)


class ForgedValueError(WorkerError, RuntimeError):
    """The store holds a value that no process of this run wrote; a RuntimeError, as all errors of
    stores are.
    """

    def __init__(self, key: str) -> None:
        super().__init__(
            f"what the store of this run holds as '{key}' was written by nobody who belongs to "
            f"the run",
            hint=f"another process reaches the store; or {SECRET_VARIABLE} is not the same for "
            f"all workers",
        )


class SecretStore(Store):
    """Another store, in which values carry an HMAC by `secret`."""

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store = store
        self._name_secret = hmac.digest(secret, b"names", _HASH)
        self._value_secret = hmac.digest(secret, b"values", _HASH)
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]  # missing in PyTorch's stub

    def set(self, key: str, value: str | bytes) -> None:
        """See base class."""
        name = self._name(key)
        # PyTorch's stub knows no bytes.
        self._store.set(name, self._sealed(name, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """See base class."""
        self._limit_wait()
        return self._opened(key, self._store.get(self._name(key)))

    def add(self, key: str, value: int) -> int:
        """See base class."""
        name = self._name(key)
        count = 0
        current = b""
        while True:
            # No two writes are the same, so that whose write was taken is seen.
            changed = self._sealed(name, f"{count + value} {secrets.token_hex(8)}")
            answer = self._compare_set(name, current, changed)
            if answer == changed:
                return count + value
            if answer == current:  # it was there, and is no more
                raise ForgedValueError(key)
            current = answer
            count = int(self._opened(key, answer).split()[0])
            if value == 0:
                return count

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """See base class."""
        name = self._name(key)
        # An empty value stands for none, as in PyTorch's stores.
        expected = b""
        if expected_value:
            expected = self._sealed(name, expected_value)
        desired = b""
        if desired_value:
            desired = self._sealed(name, desired_value)
        answer = self._compare_set(name, expected, desired)
        if not answer:
            return b""
        return self._opened(key, answer)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._name(key) for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See base class."""
        limit = timeout or self.timeout  # type: ignore[attr-defined]  # missing in PyTorch's stub
        self._store.wait([self._name(key) for key in keys], limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See base class."""
        self._limit_wait()
        values = self._store.multi_get([self._name(key) for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """See base class."""
        names = [self._name(key) for key in keys]
        sealed = [self._sealed(name, value) for name, value in zip(names, values, strict=True)]
        # missing in PyTorch's stub
        self._store.multi_set(names, sealed)  # type: ignore[attr-defined]

    def _compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        # PyTorch's stub knows no bytes.
        return self._store.compare_set(name, expected, desired)  # type: ignore[arg-type]

    def _limit_wait(self) -> None:
        # PyTorch sets the time-out of this object, which the other store must learn before it
        # waits. PyTorch's stub has no such method.
        self._store.set_timeout(self.timeout)  # type: ignore[attr-defined]

    def _name(self, key: str) -> str:
        return f"planner/{hmac.new(self._name_secret, key.encode(), _HASH).hexdigest()}"

    def _sealed(self, name: str, value: str | bytes) -> bytes:
        if isinstance(value, str):
            content = value.encode()
        else:
            content = bytes(value)
        return self._code(name, content) + content

    def _opened(self, key: str, sealed: bytes) -> bytes:
        code = sealed[:_CHARACTERS]
        content = sealed[_CHARACTERS:]
        if not hmac.compare_digest(code, self._code(self._name(key), content)):
            raise ForgedValueError(key)
        return content

    def _code(self, name: str, content: bytes) -> bytes:
        # All names are of one length, so no name and content look like another pair.
        return hmac.new(self._value_secret, name.encode() + content, _HASH).hexdigest().encode()


class Part(PrefixStore):
    """The keys of a store under a prefix.

    It keeps the other store, too: PyTorch's PrefixStore keeps only what is in C++, and loses the
    methods in Python.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._store = store


def protected(store: Store) -> Store:
    """Return a store in which only processes of this run are believed; the same store where the run
    has no secret.
    """
    secret = run_secret()
    if secret is None:
        return store
    return SecretStore(store, secret)


def group_keys(store: Store) -> Store:
    """Return the part of a store in which PyTorch's process groups find each other, under a prefix
    from the secret.

    What they write there, addresses and the ids of NCCL, is read by C++ without an HMAC: see
    docs/threat-model.md.
    """
    secret = run_secret()
    if secret is None:
        return store
    return PrefixStore(f"groups-{hmac.new(secret, b'groups', _HASH).hexdigest()}", store)


def read_record(store: Store, key: str, kind: type[RecordT]) -> RecordT:
    """Return the record that a worker wrote under `key`; raise ForgedValueError for
    anything else.
    """
    return record_in(store.get(key), key, kind)


def record_in(text: bytes, key: str, kind: type[RecordT]) -> RecordT:
    """Return the record in what was read from `key`; raise ForgedValueError for anything else."""
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        raise ForgedValueError(key) from None
