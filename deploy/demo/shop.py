"""The shop: its tables, its first rows, and customers who never stop."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

TABLES = ("shop.customers", "shop.products", "shop.orders", "shop.order_lines")

SCHEMA = """
CREATE SCHEMA shop;
CREATE TABLE shop.customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    email text NOT NULL,
    tier varchar(10) NOT NULL DEFAULT 'basic',
    notes text,
    joined timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE shop.products (
    sku text PRIMARY KEY,
    name text NOT NULL,
    price numeric(10,2) NOT NULL,
    stock integer NOT NULL,
    tags text[] NOT NULL,
    attributes jsonb NOT NULL
);
CREATE TABLE shop.orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL,
    status varchar(12) NOT NULL,
    total numeric(12,2) NOT NULL,
    due date,
    placed timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE shop.order_lines (
    order_id bigint NOT NULL,
    line_no smallint NOT NULL,
    sku text NOT NULL,
    quantity integer NOT NULL,
    price numeric(10,2) NOT NULL,
    gift boolean NOT NULL,
    PRIMARY KEY (order_id, line_no)
);
"""

CUSTOMERS, PRODUCTS, ORDERS = 1500, 500, 1500
PAUSE_S = 0.02  # between two transactions: some forty a second
STATUSES = ("paid", "packed", "shipped", "delivered")
WORDS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "granite", "harbour", "iris", "jade")


class Shop:
    """Writes to the source, reproducibly for one seed."""

    def __init__(self, connection: psycopg.Connection[Any], seed: int = 7) -> None:
        self._db = connection
        self._random = random.Random(seed)  # noqa: S311 - a shop, not a safe
        self._open_orders: list[int] = []
        self._next_order = 1
        self._next_customer = 1
        self.transactions = 0

    def create(self) -> None:
        """Make the tables and their first rows."""
        with self._db.transaction(), self._db.cursor() as cursor:
            cursor.execute(SCHEMA)
            cursor.executemany(
                "INSERT INTO shop.products VALUES (%s, %s, %s, %s, %s, %s)", self._products()
            )
            for _ in range(CUSTOMERS):
                self._join(cursor)
            for _ in range(ORDERS):
                self._order(cursor)

    def trade(self, stop: threading.Event) -> None:
        """Make one small transaction after the other until *stop*."""
        acts: list[Callable[[psycopg.Cursor[Any]], None]] = [
            self._order, self._order, self._order, self._advance, self._advance, self._advance,
            self._reprice, self._annotate, self._cancel, self._join, self._leave, self._renumber,
        ]  # fmt: skip
        while not stop.wait(PAUSE_S):
            with self._db.transaction(), self._db.cursor() as cursor:
                self._random.choice(acts)(cursor)
            self.transactions += 1

    def _products(self) -> Iterator[tuple[Any, ...]]:
        for number in range(PRODUCTS):
            tags = self._random.sample(WORDS, self._random.randint(0, 3))
            attributes = {"colour": self._random.choice(WORDS), "grams": number * 7, "box": None}
            name = f"{self._random.choice(WORDS)} no. {number}"
            price = self._price()
            yield f"sku/{number:04}", name, price, number, tags, json.dumps(attributes)

    def _price(self) -> str:
        return f"{self._random.randint(100, 99999) / 100:.2f}"

    def _sku(self) -> str:
        return f"sku/{self._random.randrange(PRODUCTS):04}"

    def _join(self, cursor: psycopg.Cursor[Any]) -> None:
        number, self._next_customer = self._next_customer, self._next_customer + 1
        name = f"{self._random.choice(WORDS).title()} {self._random.choice(WORDS).title()}"
        cursor.execute(
            "INSERT INTO shop.customers (id, name, email) VALUES (%s, %s, %s)",
            (number, name, f"customer{number}@example.com"),
        )

    def _order(self, cursor: psycopg.Cursor[Any]) -> None:
        number, self._next_order = self._next_order, self._next_order + 1
        cursor.execute(
            "INSERT INTO shop.orders (id, customer_id, status, total, due)"
            " VALUES (%s, %s, 'new', %s, current_date + 14)",
            (number, self._random.randrange(1, self._next_customer), self._price()),
        )
        for line in range(1, self._random.randint(2, 5)):
            cursor.execute(
                "INSERT INTO shop.order_lines VALUES (%s, %s, %s, %s, %s, %s)",
                (number, line, self._sku(), line * 2, self._price(), line % 2 == 0),
            )
        self._open_orders.append(number)

    def _advance(self, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(
            "UPDATE shop.orders SET status = %s, due = NULLIF(due, current_date + %s)"
            " WHERE id = %s",
            (self._random.choice(STATUSES), self._random.choice((0, 14)), self._some_order()),
        )

    def _reprice(self, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(
            "UPDATE shop.products SET price = %s, stock = stock + 1 WHERE sku = %s",
            (self._price(), self._sku()),
        )

    def _annotate(self, cursor: psycopg.Cursor[Any]) -> None:
        notes = self._random.choice((None, "calls often", "prefers “blue”, ü, 漢字 & \\n"))
        cursor.execute(
            "UPDATE shop.customers SET notes = %s, tier = 'gold' WHERE id = %s",
            (notes, self._random.randrange(1, self._next_customer)),
        )

    def _cancel(self, cursor: psycopg.Cursor[Any]) -> None:
        number = self._some_order()
        cursor.execute("DELETE FROM shop.order_lines WHERE order_id = %s", (number,))
        cursor.execute("DELETE FROM shop.orders WHERE id = %s", (number,))
        self._open_orders.remove(number)

    def _leave(self, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(
            "DELETE FROM shop.customers WHERE id = %s",
            (self._random.randrange(1, self._next_customer),),
        )

    def _renumber(self, cursor: psycopg.Cursor[Any]) -> None:
        """A key that changes: the old row must vanish everywhere, the new one appear."""
        cursor.execute(
            "UPDATE shop.order_lines SET line_no = line_no + 100"
            " WHERE (order_id, line_no) = (SELECT order_id, max(line_no) FROM shop.order_lines"
            " WHERE order_id = %s AND line_no < 100 GROUP BY order_id)",
            (self._some_order(),),
        )

    def _some_order(self) -> int:
        return self._random.choice(self._open_orders)
