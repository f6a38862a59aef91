"""Two processes that use each other's objects, one of which is not trusted.

What each may be asked is in `questions`. What crosses is plain data (`values`). An object that cannot cross is a `Remote`: it can be called, looked into
and gone through, each time by a question to the process that has it. It equals nothing but another of its kind, has
arithmetic with these alone, and no order: otherwise an object that equals everything would pass every test.
"""

import json
from collections.abc import Callable, Mapping
from typing import IO, Any

from rewards.programs import values
from rewards.programs.exceptions import ExceptionClasses, RemoteError, new_exception, written_class
from rewards.programs.questions import BETWEEN_TWO

MAX_MESSAGE_BYTES = 16 << 20


class Broken(BaseException):
    """The other process ended, or sent what is no answer. Not an Exception: a test that expects one must not take it for it."""


class Peer:
    """One end of the connection.

    Args:
        reader: From the other process.
        writer: To it.
        answers: Operations that the other process may ask for, by name.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], answers: Mapping[str, Callable[..., Any]]) -> None:
        self._reader, self._writer, self._answers = reader, writer, answers
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._exceptions = ExceptionClasses()
        self.is_broken = False
        self.num_asked = 0
        """How often the other process was asked."""

    def ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """Have an operation done by the other process, and answer its questions meanwhile.

        Lists, dicts and sets among the arguments are changed as the other process changed its copies.

        Raises:
            Exception: What it raised there.
            Broken: If no answer comes.
        """
        self.num_asked += 1
        self.send({"do": operation, "with": self._each(arguments), "named": self._write(named)})
        answer = self._answer_until_answered()
        if "raised" in answer:
            error = self._exception(answer["raised"])
            if isinstance(error, StopIteration) and operation != "next":  # it would end a loop of the test's
                raise RuntimeError(f"raised StopIteration: {error}")
            raise error
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
        self._send(json.dumps(message).encode())

    def _send(self, line: bytes) -> None:
        try:
            self._writer.write(line + b"\n")
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

    def _answer_until_answered(self) -> dict[str, Any]:
        while True:
            message = self.receive()
            if "do" not in message:
                return message
            self._answer(message)

    def _answer(self, question: Mapping[str, Any]) -> None:
        operation = question.get("do")
        if not isinstance(operation, str) or operation not in self._answers:
            raise self._broken(f"not a question that is answered: {operation!r}")
        arguments = self._checked(self._read(question.get("with")), tuple)
        named = self._checked(self._read(question.get("named")), dict)
        before = [self._write(each) if isinstance(each, list | dict | set) else None for each in arguments]
        try:
            value = self._answers[operation](*arguments, **named)
            given = self._write(value)
            after = [self._write(each) if isinstance(each, list | dict | set) else None for each in arguments]
        except Exception as error:  # noqa: BLE001  it is the other process's to handle
            self.send({"raised": self._raised(error)})
            return
        changed = {index: each for index, each in enumerate(after) if each != before[index]}
        try:
            line = json.dumps({"gives": given, "changed": changed}).encode()
        except RecursionError:
            line = b""
        if not 0 < len(line) < MAX_MESSAGE_BYTES:
            line = json.dumps({"gives": self._refer(value)}).encode()
        self._send(line)

    def _raised(self, error: Exception) -> list[Any]:
        try:
            text = str(error)[:1000]
        except Exception:  # noqa: BLE001  a class of its own
            text = ""
        return [written_class(type(error), self._number), self._each(error.args), text, self._refer(error)]

    def _exception(self, raised: Any) -> Exception:
        """Make the exception that the other process raised."""
        try:
            kind, arguments, text, remote = raised
            read = self._checked(self._read(arguments), tuple)
            return new_exception(self._exceptions.read(kind), read, str(text), self._read(remote))
        except (ValueError, TypeError, RecursionError):
            return RemoteError("an exception that cannot be told")

    def _each(self, arguments: tuple[Any, ...]) -> Any:
        return ["tuple", [self._write(each) for each in arguments]]

    def _write(self, value: Any) -> Any:
        """Write a value; one that is too deep, or holds itself, stays where it is."""
        try:
            return values.write(value, self._refer)
        except RecursionError:
            return self._refer(value)

    def _read(self, content: Any) -> Any:
        try:
            return values.read(content, self._resolve)
        except (ValueError, LookupError, RecursionError, OverflowError) as error:
            raise self._broken(f"not an answer: {error}") from error

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["yours", number_of(value)]
        if isinstance(value, type) and issubclass(value, Exception):
            theirs = self._exceptions.number(value)
            return ["class", written_class(value, self._number)] if theirs is None else ["yours", theirs]
        return ["mine", self._number(value)]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:  # kept for good, so that no other value gets its identity
            self._numbers[id(value)] = len(self._given)
            self._given.append(value)
        return self._numbers[id(value)]

    def _resolve(self, whose: str, content: Any) -> Any:
        if whose == "class":
            return self._exceptions.read(content)
        number = int(content)
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

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
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

    def _ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask(operation, self, *arguments, **named)


def _between_two(operation: str) -> Callable[[Remote, object], Any]:
    """Make an operator of two remote objects, which makes a third: a plain value would decide what no test compares."""

    def operate(one: Remote, other: object) -> Any:
        made = one._ask(operation, other) if isinstance(other, Remote) else NotImplemented  # noqa: SLF001
        return made if isinstance(made, Remote) else NotImplemented

    return operate


for _operation in BETWEEN_TWO:
    setattr(Remote, f"__{_operation}__", _between_two(_operation))


def number_of(remote: Remote) -> int:
    """Give the number under which the other process knows the object."""
    number: int = object.__getattribute__(remote, "_number")
    return number


def _replace(old: Any, new: Any) -> None:
    """Give a list, dict or set the content of another."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)
