"""Two processes that use each other's objects, one of which is not trusted.

The solution's process answers everything that is asked of its objects. The checker's answers one thing: calls of functions that a
test handed over. What crosses is plain data (`values`). An object that cannot cross is a `Remote`: it can be called, looked into
and gone through, each time by a question to the process that has it. It equals nothing but another of its kind, and knows no
arithmetic and no order: otherwise an object that equals everything would pass every test.
"""

import builtins
import json
import operator
from collections.abc import Callable, Mapping
from typing import IO, Any

from rewards.programs import values

MAX_MESSAGE_BYTES = 16 << 20

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **named: target(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "eq": operator.eq,
    "isinstance": lambda kind, instance: isinstance(instance, kind),
}


class Broken(BaseException):
    """The other process ended, or sent what is no answer. Not an Exception: a test that expects one must not take it for it."""


class RemoteError(Exception):
    """An exception of the other process whose class is not a built-in one."""


class Peer:
    """One end of the connection.

    Args:
        reader: From the other process.
        writer: To it.
        answers: Operations that the other process may ask for.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], answers: frozenset[str]) -> None:
        self._reader, self._writer, self._answers = reader, writer, answers
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.is_broken = False

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Have an operation done by the other process, and answer its questions meanwhile.

        Lists, dicts and sets among the arguments are changed as the other process changed its copies.

        Raises:
            Exception: What it raised there.
            Broken: If no answer comes.
        """
        self.send({"do": operation, "with": self._write(arguments), "named": self._write(named)})
        answer = self._answer_until_answered()
        if "raised" in answer:
            raise _exception(answer["raised"])
        changed = self._checked(answer.get("changed", {}), dict)
        for position, argument in enumerate(arguments):
            if str(position) in changed:
                _replace(argument, self._read(changed[str(position)]))
        return self._read(answer.get("gives"))

    def serve(self) -> None:
        """Answer questions until the other process is gone."""
        try:
            while True:
                self._answer(self.receive())
        except Broken:
            return

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            Broken: If nobody listens.
        """
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError as error:
            raise self._broken("nobody listens") from error

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            Broken: If the other process ended or sent what is no message.
        """
        line = self._reader.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise self._broken("the program ended" if len(line) < MAX_MESSAGE_BYTES else "an answer is too long")
        try:
            return self._checked(json.loads(line), dict)  # type: ignore[no-any-return]
        except (ValueError, RecursionError) as error:
            raise self._broken("not a message") from error

    def give(self, value: Any) -> Any:
        """Write a value, for a message of one's own."""
        return self._write(value)

    def take(self, content: Any) -> Any:
        """Read a value of such a message.

        Raises:
            Broken: If it is none.
        """
        return self._read(content)

    def _answer_until_answered(self) -> dict[str, Any]:
        while True:
            message = self.receive()
            if "do" not in message:
                return message
            self._answer(message)

    def _answer(self, question: Mapping[str, Any]) -> None:
        operation = question.get("do")
        if operation not in self._answers:
            raise self._broken(f"not a question that is answered: {operation!r}")
        arguments = self._checked(self._read(question.get("with")), tuple)
        named = self._checked(self._read(question.get("named")), dict)
        before = [self._write(each) if isinstance(each, list | dict | set) else None for each in arguments]
        try:
            given = self._write(OPERATIONS[operation](*arguments, **named))
            after = [self._write(each) if isinstance(each, list | dict | set) else None for each in arguments]
        except Exception as error:  # noqa: BLE001  it is the other process's to handle
            self.send({"raised": [type(error).__name__, str(error)[:1000]]})
            return
        changed = {index: each for index, each in enumerate(after) if each != before[index]}
        self.send({"gives": given, "changed": changed})

    def _write(self, value: Any) -> Any:
        return values.write(value, self._refer)

    def _read(self, content: Any) -> Any:
        try:
            return values.read(content, self._resolve)
        except (ValueError, LookupError, RecursionError, OverflowError) as error:
            raise self._broken(f"not an answer: {error}") from error

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["yours", number_of(value)]
        if id(value) not in self._numbers:  # kept for good, so that no other value gets its identity
            self._numbers[id(value)] = len(self._given)
            self._given.append(value)
        return ["mine", self._numbers[id(value)]]

    def _resolve(self, whose: str, number: int) -> Any:
        if whose == "mine":
            return Remote(self, number)
        if number < 0:
            raise LookupError(f"no object {number}")
        return self._given[number]

    def _checked(self, content: Any, kind: type) -> Any:
        if not isinstance(content, kind):
            raise self._broken(f"not a {kind.__name__}")
        return content

    def _broken(self, why: str) -> Broken:
        self.is_broken = True
        return Broken(why)


class Remote:
    """An object of the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it over there."""
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying and numpy's ask for these
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._ask("eq", other))

    def __hash__(self) -> int:
        return number_of(self)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(self._ask("isinstance", instance))

    def _ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask(operation, self, *arguments, **named)


def number_of(remote: Remote) -> int:
    """Give the number under which the other process knows the object."""
    number: int = object.__getattribute__(remote, "_number")
    return number


def _exception(raised: Any) -> Exception:
    """Make the exception that the other process raised, of the same class if that is a built-in one."""
    name, text = raised if isinstance(raised, list) and len(raised) == 2 else ("Exception", "")
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(text))
        except TypeError:  # one that wants more than a text
            pass
    return RemoteError(f"{name}: {text}")


def _replace(old: Any, new: Any) -> None:
    """Give a list, dict or set the content of another."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)
