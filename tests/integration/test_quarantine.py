"""A row that a sink cannot take: kept aside, shown, replayed, dropped; the others go on."""

from __future__ import annotations

import json

import pytest

from sinks.warehouse import target_name
from tests.support.waiting import wait_until


@pytest.fixture
def prices(pipeline):
    """A pipeline with one table of three rows."""
    found = pipeline("prices")
    found.db.execute(
        f"CREATE TABLE {found.name}.prices (id int PRIMARY KEY, price numeric(12,2), note text)"
    )
    found.db.execute(
        f"INSERT INTO {found.name}.prices SELECT i, i, 'n' FROM generate_series(1,3) i"
    )
    return found


def test_what_a_sink_cannot_take_is_kept_until_it_can(prices, spark):
    """One bad row waits with its reason and holds nobody up; a replay brings its newest state."""
    path = prices.config_path(["postgres", "delta"])
    config = prices.apply(path)
    (table,) = prices.catalogue(config).values()
    target = f"{config.sinks[0].target_schema}.{target_name(table)}"
    source = f"{prices.name}.prices"
    command = ("--config", str(path))

    def kept():
        done = prices.cdc("quarantine", "list", "--json", *command)
        assert done.returncode == 0, done.stderr
        assert "98765" not in done.stdout
        return json.loads(done.stdout)

    with prices.running(config, spark) as (warehouse, lake):
        wait_until(lambda: not prices.differences(config), within_s=180)
        prices.db.execute(f"ALTER TABLE {target} ADD CONSTRAINT cheap CHECK (price < 98765)")
        prices.db.execute(f"UPDATE {source} SET price = 98765 WHERE id = 1")
        prices.db.execute(f"UPDATE {source} SET price = 'NaN' WHERE id = 2")
        prices.db.execute(f"UPDATE {source} SET note = 'goes on' WHERE id = 3")
        # NaN is no decimal of Delta's, and sorts above every number in PostgreSQL.
        wait_until(lambda: sum(warehouse.status.refused.values()) == 2, within_s=60)
        wait_until(lambda: sum(lake.status.refused.values()) == 1, within_s=60)
        assert {warehouse.status.state, lake.status.state} == {"running"}

        found = [each for each in kept() if each["sink"] == warehouse.settings.name]
        assert len(found) == 2
        assert all("cheap" in each["reason"] for each in found)
        shown = prices.cdc("quarantine", "show", found[0]["id"], "--json", *command)
        assert "98765" in json.loads(shown.stdout)["value"]

        ids = [each["id"] for each in found]
        again = prices.cdc("quarantine", "replay", *ids, *command)
        assert again.returncode == 1
        assert "2 refused again" in again.stdout

        prices.db.execute(f"ALTER TABLE {target} DROP CONSTRAINT cheap")
        prices.db.execute(f"UPDATE {source} SET price = 5 WHERE id = 2")
        taken = prices.cdc("quarantine", "replay", *ids, *command)
        assert taken.returncode == 0, taken.stderr
        assert "2 taken" in taken.stdout
        wait_until(lambda: not prices.differences(config), within_s=60)

        (left,) = kept()
        assert left["sink"] == lake.settings.name
        dropped = prices.cdc("quarantine", "drop", left["id"], *command)
        assert dropped.returncode == 0, dropped.stderr
        assert kept() == []
        missing = prices.cdc("quarantine", "show", left["id"], *command)
        assert missing.returncode == 1
        assert "cdc quarantine list" in missing.stderr


def test_a_replay_does_not_bring_a_deleted_row_back(prices, spark):
    """The row was deleted while its last update was kept: it stays deleted."""
    path = prices.config_path(["postgres"])
    config = prices.apply(path)
    (table,) = prices.catalogue(config).values()
    target = f"{config.sinks[0].target_schema}.{target_name(table)}"
    source = f"{prices.name}.prices"
    with prices.running(config, spark) as (warehouse,):
        wait_until(lambda: not prices.differences(config), within_s=120)
        prices.db.execute(f"ALTER TABLE {target} ADD CONSTRAINT cheap CHECK (price < 98765)")
        prices.db.execute(f"UPDATE {source} SET price = 98765 WHERE id = 1")
        wait_until(lambda: sum(warehouse.status.refused.values()) == 1, within_s=60)
        prices.db.execute(f"DELETE FROM {source} WHERE id = 1")
        prices.db.execute(f"ALTER TABLE {target} DROP CONSTRAINT cheap")
        wait_until(lambda: not prices.differences(config), within_s=60)
        done = prices.cdc("quarantine", "replay", "--all", "--config", str(path))
        assert done.returncode == 0, done.stderr
        assert prices.differences(config) == {}
