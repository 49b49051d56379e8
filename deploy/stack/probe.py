"""Asking a server on loopback; whatever is wrong is a NotReady that says what."""

from __future__ import annotations

import socket

import requests

from deploy.stack.server import NotReady
from deploy.stack.settings import HOST

ASK_TIMEOUT_S = 5.0


def check_port(port: int) -> None:
    try:
        socket.create_connection((HOST, port), ASK_TIMEOUT_S).close()
    except OSError as error:
        raise NotReady(f"port {port}: {(error.strerror or 'no answer').lower()}") from error


def ask(url: str) -> str:
    try:
        # Loopback is never behind the proxy that the environment may name.
        with requests.Session() as session:
            session.trust_env = False
            answer = session.get(url, timeout=ASK_TIMEOUT_S)
    except requests.ConnectionError as error:
        raise NotReady("the port is closed") from error
    except requests.RequestException as error:
        raise NotReady(f"no answer: {type(error).__name__}") from error
    if answer.status_code != requests.codes.ok:
        raise NotReady(f"HTTP {answer.status_code}")
    return answer.text
