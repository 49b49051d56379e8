"""The load: inserts, updates, deletes, re-creations and moved keys, without end, from one seed.

Every write of a row takes the next number of one count and stores it in the row's column `n`, so
that over the whole life of a key, also across deletes, `n` only grows: in the log and in all sinks.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

Key = tuple[Any, ...]
Row = tuple[str, Key]  # table without its schema, primary key

SCHEMA = """
CREATE TABLE {0}.counters (id integer PRIMARY KEY, n bigint NOT NULL);
CREATE TABLE {0}.people (
    id bigint PRIMARY KEY, n bigint NOT NULL, name text, balance numeric(12,2), tags text[],
    doc jsonb
);
CREATE TABLE {0}.parts (
    left_id text, right_id text, n bigint NOT NULL, amount integer, note text,
    PRIMARY KEY (left_id, right_id)
);
ALTER TABLE {0}.counters REPLICA IDENTITY FULL;
ALTER TABLE {0}.people REPLICA IDENTITY FULL;
ALTER TABLE {0}.parts REPLICA IDENTITY FULL;
"""
TABLES = ("counters", "people", "parts")
KEY_COLUMNS = {"counters": ("id",), "people": ("id",), "parts": ("left_id", "right_id")}

COUNTERS = 40
PEOPLE = 300  # keys that come and go; most of the time two thirds of them exist
FIRST_MORTAL = 1_000_000  # keys from here on are used once, and deleted for good
MORTALS = 100  # alive at a time
LEFTS = ("a", "a-b", "ü/: {}", "漢字 %", 'q"\\')
RIGHTS = tuple(f"{word}{number}" for word in ("c", "b-c", "") for number in range(10))
MARKERS = 12  # keys per table to choose one for each partition from; ids below zero

HEAVY_PAUSE_S = 0.02
RECONNECT_S = 0.3
JOIN_S = 20.0
REST_S = 120.0  # the source may have to come back first


@dataclass
class Load:
    """One writer to the source. It survives the source: what became of a lost commit is looked up.

    *rate* is changes a second. Nobody else writes to its rows, but `mark` may run beside it.
    """

    env: Mapping[str, str]
    schema: str
    seed: int
    rate: float
    changes: int = 0
    outages: int = 0
    failure: BaseException | None = None  # what ended the writer, if anything did
    graveyard: list[Row] = field(default_factory=list)  # deleted for good, in order
    _n: int = 0
    _heavy: threading.Event = field(default_factory=threading.Event)
    _go: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _next_mortal: int = FIRST_MORTAL

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._people: set[int] = set()
        self._parts: set[Key] = set()
        self._mortals: list[int] = []
        self._dying: list[int] = []  # in the transaction that is under way
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def create(self) -> None:
        """Make the tables in their schema, with first rows, which a snapshot will find."""
        with self._connect() as db:
            db.execute(SCHEMA.format(self.schema))
            with db.transaction(), db.cursor() as cursor:
                cursor.executemany(
                    self._sql("INSERT INTO {0}.counters VALUES (%s, %s)"),
                    [(number, self._next()) for number in range(COUNTERS)],
                )
                for marker in range(1, MARKERS + 1):
                    cursor.execute(self._sql("INSERT INTO {0}.counters VALUES (%s, 0)"), (-marker,))
                    cursor.execute(
                        self._sql("INSERT INTO {0}.people (id, n) VALUES (%s, 0)"), (-marker,)
                    )
                    cursor.execute(
                        self._sql("INSERT INTO {0}.parts VALUES ('marker', %s, 0)"), (str(marker),)
                    )
                for number in range(PEOPLE // 2):
                    self._put_person(cursor, number)
                for left in LEFTS:
                    self._put_part(cursor, (left, RIGHTS[0]))
            self._reload(db)

    def start(self) -> None:
        self._go.set()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._go.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No change is under way, and none will be until the block ends."""
        self._idle.clear()
        self._go.clear()
        try:
            assert self._idle.wait(REST_S), "the load did not come to rest"
            yield
        finally:
            self._go.set()

    def heavy(self, *, on: bool) -> None:
        """Nothing but counters, as fast as the source takes them."""
        (self._heavy.set if on else self._heavy.clear)()

    def mark(self, markers: Mapping[str, list[Key]], number: int) -> None:
        """Write *number* into the rows *markers*, in one transaction of its own."""
        with self._connect() as db, db.transaction():
            for table, keys in markers.items():
                same = " AND ".join(f"{column} = %s" for column in KEY_COLUMNS[table])
                for key in keys:
                    db.execute(
                        self._sql(f"UPDATE {{0}}.{table} SET n = %s WHERE {same}"), (number, *key)
                    )

    def sample(self, chance: random.Random, count: int) -> list[Row]:
        """Some keys that exist, do not exist, or must never exist again."""
        rows: list[Row] = []
        graves, mortals = len(self.graveyard), self._next_mortal
        for _ in range(count):
            match chance.randrange(8):
                case 0 | 1 | 2:
                    rows.append(("counters", (chance.randrange(COUNTERS),)))
                case 3 | 4:
                    rows.append(("people", (chance.randrange(PEOPLE),)))
                case 5:
                    rows.append(("parts", (chance.choice(LEFTS), chance.choice(RIGHTS))))
                case 6 if graves:
                    rows.append(self.graveyard[chance.randrange(graves)])
                case _:
                    recent = max(FIRST_MORTAL, mortals - 2 * MORTALS)
                    rows.append(("people", (chance.randrange(recent, mortals + 1),)))
        return rows

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as db:
                    self._reload(db)
                    self._work(db)
            except psycopg.OperationalError:
                # A server that was killed. Whether the last commit happened, the reload will say.
                self.outages += 1
                self._stop.wait(RECONNECT_S)
            except Exception as error:
                self.failure = error
                raise

    def _work(self, db: psycopg.Connection[Any]) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            if not self._go.is_set():
                self._idle.set()
                self._go.wait()
                due = time.monotonic()
                continue
            if self._heavy.is_set():
                self.changes += self._bump_all(db)
                self._stop.wait(HEAVY_PAUSE_S)
                due = time.monotonic()
                continue
            done = self._transaction(db)
            self.changes += done
            due += done / self.rate
            if due < time.monotonic() - 1.0:  # after an outage there is no hurry
                due = time.monotonic()
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _transaction(self, db: psycopg.Connection[Any]) -> int:
        acts: list[Callable[[psycopg.Cursor[Any]], int]] = [
            self._bump, self._bump, self._bump, self._bump, self._bump, self._touch_person,
            self._touch_person, self._toggle_person, self._move_person, self._touch_part,
            self._toggle_part, self._move_part, self._be_born, self._die,
        ]  # fmt: skip
        count = self._random.choice((1, 1, 1, 2, 5))
        with db.transaction(), db.cursor() as cursor:
            done = sum(self._random.choice(acts)(cursor) for _ in range(count))
        self._settle()
        return max(1, done)

    def _reload(self, db: psycopg.Connection[Any]) -> None:
        """Take what exists from the source, which alone knows."""
        ids = [row[0] for row in db.execute(self._sql("SELECT id FROM {0}.people WHERE id >= 0"))]
        self._people = {number for number in ids if number < FIRST_MORTAL}
        alive = {number for number in ids if number >= FIRST_MORTAL}
        self._dying = [n for n in (*self._mortals, *self._dying) if n not in alive]
        self._mortals = sorted(alive)
        parts = db.execute(
            self._sql("SELECT left_id, right_id FROM {0}.parts WHERE left_id <> 'marker'")
        )
        self._parts = {(left, right) for left, right in parts}
        self._settle()

    def _settle(self) -> None:
        """The transaction is over: who died in it is dead."""
        self.graveyard += [("people", (number,)) for number in self._dying]
        self._dying = []

    def _next(self) -> int:
        self._n += 1
        return self._n

    def _bump_all(self, db: psycopg.Connection[Any]) -> int:
        first = self._n + 1
        self._n += COUNTERS
        with db.transaction():
            query = "UPDATE {0}.counters SET n = %s + id WHERE id >= 0"
            return db.execute(self._sql(query), (first,)).rowcount

    def _bump(self, cursor: psycopg.Cursor[Any]) -> int:
        chosen = self._random.sample(range(COUNTERS), self._random.choice((1, 3, 8)))
        for number in chosen:
            cursor.execute(
                self._sql("UPDATE {0}.counters SET n = %s WHERE id = %s"), (self._next(), number)
            )
        return len(chosen)

    def _put_person(self, cursor: psycopg.Cursor[Any], number: int) -> int:
        self._people.add(number) if number < FIRST_MORTAL else self._mortals.append(number)
        tags = self._random.choice((None, [], ["x", None, 'c,"d'], ["ü"] * 5))
        doc = self._random.choice((None, {"n": number, "list": [1, 2.5, None]}, {"ü": {}}))
        cursor.execute(
            self._sql("INSERT INTO {0}.people VALUES (%s, %s, %s, %s, %s, %s)"),
            (
                *(number, self._next(), self._name(), self._random.randrange(10**6) / 100, tags),
                None if doc is None else json.dumps(doc),
            ),
        )
        return 1

    def _touch_person(self, cursor: psycopg.Cursor[Any]) -> int:
        number = self._random.choice(sorted(self._people) + self._mortals)
        cursor.execute(
            self._sql(
                "UPDATE {0}.people SET n = %s, name = %s, balance = balance + 1 WHERE id = %s"
            ),
            (self._next(), self._name(), number),
        )
        return 1

    def _toggle_person(self, cursor: psycopg.Cursor[Any]) -> int:
        """Delete one, or make a new one under an old key."""
        number = self._random.randrange(PEOPLE)
        if number not in self._people:
            return self._put_person(cursor, number)
        if len(self._people) > PEOPLE // 2:
            self._people.remove(number)
            cursor.execute(self._sql("DELETE FROM {0}.people WHERE id = %s"), (number,))
            return 1
        return self._touch_person(cursor)

    def _move_person(self, cursor: psycopg.Cursor[Any]) -> int:
        """A key that changes: a delete of the old one and a new row."""
        old, new = self._random.choice(sorted(self._people)), self._random.randrange(PEOPLE)
        if new in self._people:
            return self._touch_person(cursor)
        self._people.remove(old)
        self._people.add(new)
        cursor.execute(
            self._sql("UPDATE {0}.people SET id = %s, n = %s WHERE id = %s"),
            (new, self._next(), old),
        )
        return 2

    def _be_born(self, cursor: psycopg.Cursor[Any]) -> int:
        if len(self._mortals) >= MORTALS:
            return self._die(cursor)
        self._next_mortal += 1
        return self._put_person(cursor, self._next_mortal)

    def _die(self, cursor: psycopg.Cursor[Any]) -> int:
        if not self._mortals:
            return self._be_born(cursor)
        number = self._mortals.pop(self._random.randrange(len(self._mortals)))
        self._dying.append(number)
        cursor.execute(self._sql("DELETE FROM {0}.people WHERE id = %s"), (number,))
        return 1

    def _put_part(self, cursor: psycopg.Cursor[Any], key: Key) -> int:
        self._parts.add(key)
        cursor.execute(
            self._sql("INSERT INTO {0}.parts VALUES (%s, %s, %s, %s, %s)"),
            (*key, self._next(), self._random.randrange(1000), self._name()),
        )
        return 1

    def _touch_part(self, cursor: psycopg.Cursor[Any]) -> int:
        if not self._parts:
            return self._toggle_part(cursor)
        cursor.execute(
            self._sql(
                "UPDATE {0}.parts SET n = %s, amount = amount + 1, note = %s"
                " WHERE left_id = %s AND right_id = %s"
            ),
            (self._next(), self._name(), *self._random.choice(sorted(self._parts))),
        )
        return 1

    def _toggle_part(self, cursor: psycopg.Cursor[Any]) -> int:
        key = self._some_part()
        if key not in self._parts:
            return self._put_part(cursor, key)
        self._parts.remove(key)
        cursor.execute(self._sql("DELETE FROM {0}.parts WHERE left_id = %s AND right_id = %s"), key)
        return 1

    def _move_part(self, cursor: psycopg.Cursor[Any]) -> int:
        new = self._some_part()
        if not self._parts or new in self._parts:
            return self._toggle_part(cursor)
        old = self._random.choice(sorted(self._parts))
        self._parts.remove(old)
        self._parts.add(new)
        cursor.execute(
            self._sql(
                "UPDATE {0}.parts SET left_id = %s, right_id = %s, n = %s"
                " WHERE left_id = %s AND right_id = %s"
            ),
            (*new, self._next(), *old),
        )
        return 2

    def _some_part(self) -> Key:
        return self._random.choice(LEFTS), self._random.choice(RIGHTS)

    def _name(self) -> str | None:
        return self._random.choice((None, "Ada", "Grace “ü” 漢字", "x" * 300, "a\n\tb\\"))

    def _sql(self, text: str) -> bytes:
        return text.format(self.schema).encode()

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=self.env["CDC_PG_HOST"],
            port=self.env["CDC_PG_PORT"],
            dbname=self.env["CDC_PG_DATABASE"],
            user=self.env["CDC_PG_USER"],
            password=self.env["CDC_PG_PASSWORD"],
            connect_timeout=5,
            autocommit=True,
        )
