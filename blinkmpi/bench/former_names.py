"""Read results of older versions: the names that keys, protocols and flags had then, mapped to those of today."""

from typing import Any

KEYS = {"runner": "executor", "runners": "executors"}
PROTOCOLS = {"oneshot": "ll16_one_shot", "twoshot": "ll16_two_shot", "oneshot128": "ll128_one_shot",
             "twoshot128": "ll128_two_shot", "halves": "rs_ag"}  # fmt: skip


def with_current_names(body: Any) -> Any:
    """A copy of a JSON document with today's names; the environment that it quotes stays as it was."""
    if isinstance(body, list):
        return [with_current_names(item) for item in body]
    if not isinstance(body, dict):
        return body
    found: dict[str, Any] = {KEYS.get(str(key), str(key)): with_current_names(value) for key, value in body.items()}
    if isinstance(words := found.get("args"), list):
        found["args"] = ["--executor" if word == "--runner" else word for word in words]
    if isinstance(name := found.get("protocol"), str):
        found["protocol"] = PROTOCOLS.get(name, name)
    if isinstance(name := found.get("executor"), str):
        found["executor"] = name.replace("C runner", "C executor")
    return found
