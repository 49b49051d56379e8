"""What a target owes the pipeline. Two small protocols, one vocabulary.

A target converges: any slice may come again, an older one may come late, half of one may have been
written before a crash. Five rules, each held by the contract suite:

1. Durable on return. The ledger moves only after the rows, or together with them.
2. Stale is success. Per key the highest version stays; a delete counts as a version.
3. A half-written slice is allowed, because its replay completes it.
4. Only errors of `cdc.errors` leave a sink.
5. What can never be taken is refused, one by one; all else about the slice still holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from cdc.change import Row, Slice, Table


@dataclass(frozen=True, slots=True)
class Entry:
    """What a ledger knows of one topic. *offsets* is the next offset to read, per partition.

    *unswept*: rows of older generations may still be held, which nothing in the log deletes.
    """

    topic_id: str
    generation: int
    partitions: int
    offsets: Mapping[int, int] = field(default_factory=dict)
    unswept: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write, until somebody else claims: *token* grows with every claim."""

    token: int
    entries: Mapping[str, Entry]  # by topic; a topic without an entry was never read


class Refusal(NamedTuple):
    """A change that the target can never take. *reason* has codes and columns, never a value."""

    partition: int
    offset: int
    reason: str


class Written(NamedTuple):
    applied: int
    stale: int  # the target already held something as new or newer: success
    refused: tuple[Refusal, ...] = ()


class Sink(Protocol):
    """A target that takes rows. Lives on the driver for the ledger, on executors for the rows.

    *tables* maps each topic to the table behind it.
    """

    name: str

    def prepare(self, tables: Mapping[str, Table]) -> None:
        """Create what is missing. Fail here if a write could not succeed. Safe to repeat."""

    def claim(self) -> Claim:
        """Take the next fencing token, durably; from now on older tokens cannot write."""

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None:
        """Set the ledger to *entries*, before the first row of a generation is written."""

    def write(self, token: int, piece: Slice) -> Written:
        """Make *piece* durable, then move the ledger. Raises SinkFenced if *token* is old.

        If some changes are refused, the ledger stays: the caller keeps them elsewhere, and writes
        the piece again without them. Not all that will be refused need be told at once.
        """

    def repair(self, piece: Slice) -> Written | None:
        """Apply changes that were left out once, beside whoever writes now; move no ledger.

        *piece.next_offset* is how far the log was read to know them the newest of their keys. What
        the ledger has not come to is left to the writer, which brings it in its turn: stale.
        None, and nothing done, if the ledger is past it or of another generation. If some are
        refused, repair again without them.
        """

    def sweep(self, token: int, topic: str, table: Table) -> int:
        """Remove the rows of older generations than the ledger's, and note that it is done."""

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]:
        """Every row of *table* held here, with its version, in no order: for comparison."""

    def close(self) -> None:
        """Let go of the connection. Does not raise."""


@runtime_checkable
class FrameSink(Protocol):
    """A target that takes a whole batch on the driver as a Spark frame.

    *frame* has the columns of `FRAME_COLUMNS`, at most one line per key.
    """

    name: str

    def prepare(self, tables: Mapping[str, Table]) -> None: ...

    def claim(self) -> Claim: ...

    def assign(self, token: int, entries: Mapping[str, Entry]) -> None: ...

    def merge(
        self, token: int, topic: str, table: Table, frame: Any, offsets: Mapping[int, int]
    ) -> Written:
        """Apply *frame* and move the ledger to *offsets* in one commit.

        If some changes are refused, nothing is committed: merge again without them.
        """

    def repair(self, piece: Slice) -> Written | None: ...

    def sweep(self, token: int, topic: str, table: Table) -> int: ...

    def rows(self, table: Table) -> Iterator[tuple[Row, int | None]]: ...

    def close(self) -> None: ...


# partition int, key string (key_text), row string (JSON, null when gone), version long
FRAME_COLUMNS: Sequence[str] = ("partition", "key", "row", "version")
