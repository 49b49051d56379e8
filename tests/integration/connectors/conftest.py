"""A schema of its own for every test, which leaves nothing behind."""

import secrets

import psycopg
import pytest
from psycopg import sql

from connectors import lifecycle
from tests.support.source import configured


@pytest.fixture
def database(stack):
    with psycopg.connect(
        host=stack["CDC_PG_HOST"],
        port=stack["CDC_PG_PORT"],
        dbname=stack["CDC_PG_DATABASE"],
        user=stack["CDC_PG_USER"],
        password=stack["CDC_PG_PASSWORD"],
        autocommit=True,
    ) as connection:
        yield connection


@pytest.fixture
def name(stack, database):
    """A fresh name, which is also a schema; all that was made under it goes at the end."""
    chosen = f"t{secrets.token_hex(4)}"
    database.execute(sql.SQL("CREATE SCHEMA {0}").format(sql.Identifier(chosen)))
    database.execute(sql.SQL("SET search_path TO {0}").format(sql.Identifier(chosen)))
    yield chosen
    rows = database.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = %s", (chosen,)
    ).fetchall()
    tables = {"t", *(row[0] for row in rows)}
    lifecycle.remove(configured(stack, chosen, *tables), drop_log=True)
    database.execute(sql.SQL("DROP SCHEMA {0} CASCADE").format(sql.Identifier(chosen)))


@pytest.fixture
def table(stack, name, database):
    """One table `t`, and its configuration."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int, large text DEFAULT 'filled')")
    database.execute("ALTER TABLE t ALTER large SET STORAGE EXTERNAL")
    return configured(stack, name, "t")
