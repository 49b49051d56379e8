"""The keys of rows in Redis, and the codes of its errors: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from redis.exceptions import ReadOnlyError, ResponseError

from cdc.change import Column, Table
from sinks.redis import answer_code, row_key, table_head, tombstone_key

NAMES = st.text(alphabet="ab.:%{}~*é", min_size=1, max_size=6)
VALUES = st.one_of(st.integers(-5, 5), st.text(alphabet='a}{%",:', max_size=5), st.none())
PLACES = st.tuples(NAMES, NAMES, st.lists(VALUES, min_size=1, max_size=3).map(tuple))


def key_of(schema, name, key, prefix="p:"):
    table = Table(schema, name, (Column("id", "text"),), ("id",))
    return row_key(table_head(prefix, table), key)


@given(PLACES, PLACES)
def test_row_keys_of_different_rows_never_meet(one, other):
    """Two rows share a key only if they are the same row of the same table."""
    assert (key_of(*one) == key_of(*other)) == (one == other)
    assert key_of(*one) != tombstone_key(key_of(*other))


@given(PLACES)
def test_row_and_tombstone_share_a_slot(place):
    """Whatever braces a key holds, row and tombstone have one hash tag, and it is not empty."""
    row = key_of(*place)
    tag = row[row.index("{") + 1 : row.index("}")]
    assert tag
    assert row.endswith(f"{{{tag}}}")
    assert key_slot(row.encode()) == key_slot(tombstone_key(row).encode())


def test_row_key_is_readable():
    """An ordinary row has the key that one would guess."""
    assert key_of("public", "orders", (42,), prefix="shop:") == "shop:{public.orders:42}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE"),
        (
            ResponseError(
                "Error running script (call to f_a3): @user_script:1: @user_script: 1:"
                " -OOM command not allowed when used memory > 'maxmemory'."
            ),
            "OOM",
        ),
        (
            ResponseError("Error running script (call to f_a3): @user_script:1: WRONGTYPE Oper"),
            "WRONGTYPE",
        ),
        (ResponseError("OOM command not allowed script: a3, on @user_script:5."), "OOM"),
        (ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (ResponseError("unknown command `X`, with args beginning with: `secret`"), "ERR"),
    ],
)
def test_answer_code_is_found_inside_a_script_error(error, code):
    """Redis 6.2 and 7 wrap a failed command differently; its own code is what counts."""
    assert answer_code(error) == code
